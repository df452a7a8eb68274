"""First come, first served: what is started, grown and refused, worked out by hand; and what always holds."""

from dataclasses import replace

from schedulers import first_come
from shoal_service.core.scheduling.market import (
    Decision,
    MarketJob,
    MarketNode,
    MarketState,
    Preempt,
    Wait,
)
from shoal_service.simulator.traces import WORKER


def _nodes(*cpus: float) -> list[MarketNode]:
    return [MarketNode(node_id=f"n{i}", cpus=c) for i, c in enumerate(cpus)]


def _job(
    name: str,
    low: int = 1,
    high: int = 1,
    *,
    granted: int = 0,
    priority: int = 0,
    at: float = 0.0,
    leaving: bool = False,
) -> MarketJob:
    return MarketJob(
        job_id=name,
        priority=priority,
        submitted_at=at,
        min_workers=low,
        max_workers=high,
        need=WORKER,
        granted=granted,
        is_leaving=leaving,
    )


def decide(jobs: list[MarketJob], nodes: list[MarketNode]) -> list[Decision]:
    return list(first_come(MarketState(jobs=jobs, nodes=nodes), 0.0))


def _brief(decisions: list[Decision]) -> list[tuple[str, str, int]]:
    return [(type(d).__name__, d.job_id, 0 if isinstance(d, Wait | Preempt) else d.workers) for d in decisions]


class TestQueue:
    def test_a_job_gets_as_many_workers_as_fit_up_to_its_maximum(self) -> None:
        assert _brief(decide([_job("a", 1, 4)], _nodes(3))) == [("Start", "a", 3)]
        assert _brief(decide([_job("a", 1, 4)], _nodes(8))) == [("Start", "a", 4)]

    def test_all_or_nothing(self) -> None:
        jobs = [_job("running", 1, 3, granted=3), _job("a", 2, 4)]
        assert _brief(decide(jobs, _nodes(4))) == [("Wait", "a", 0)]

    def test_older_jobs_first_and_larger_priorities_before_them(self) -> None:
        jobs = [_job("young", at=2), _job("old", at=1), _job("urgent", at=3, priority=1)]
        assert [d.job_id for d in decide(jobs, _nodes(3))] == ["urgent", "old", "young"]

    def test_a_job_that_does_not_fit_blocks_those_behind_it(self) -> None:
        jobs = [_job("running", 1, 2, granted=2), _job("large", 4, 4, at=1), _job("small", at=2)]
        assert _brief(decide(jobs, _nodes(4))) == [("Wait", "large", 0), ("Wait", "small", 0)]

    def test_a_job_that_can_never_run_here_blocks_no_other(self) -> None:
        decisions = decide([_job("large", 5, 5, at=1), _job("small", at=2)], _nodes(4))
        assert _brief(decisions) == [("Wait", "large", 0), ("Start", "small", 1)]


class TestRunning:
    def test_a_running_job_grows_if_no_job_waits(self) -> None:
        assert _brief(decide([_job("a", 1, 4, granted=2)], _nodes(3))) == [("Resize", "a", 3)]
        assert decide([_job("a", 1, 2, granted=2)], _nodes(3)) == []

    def test_no_job_grows_while_another_waits(self) -> None:
        jobs = [_job("a", 1, 4, granted=2), _job("b", 3, 3, at=1)]
        assert _brief(decide(jobs, _nodes(4))) == [("Wait", "b", 0)]

    def test_a_job_that_could_never_run_does_not_stop_growth(self) -> None:
        jobs = [_job("a", 1, 4, granted=2), _job("b", 99, 99, at=1)]
        assert _brief(decide(jobs, _nodes(4))) == [("Resize", "a", 4), ("Wait", "b", 0)]

    def test_a_job_above_its_maximum_is_shrunk_and_the_room_counts_next_time(self) -> None:
        jobs = [_job("a", 1, 2, granted=4), _job("b", 1, 2, at=1)]
        assert _brief(decide(jobs, _nodes(4))) == [("Resize", "a", 2), ("Wait", "b", 0)]
        jobs[0] = replace(jobs[0], granted=2)
        assert _brief(decide(jobs, _nodes(4))) == [("Start", "b", 2)]

    def test_a_job_below_its_minimum_comes_before_the_queue(self) -> None:
        jobs = [_job("raised", 3, 4, granted=1), _job("b", at=-1, priority=9)]
        assert _brief(decide(jobs, _nodes(3))) == [("Wait", "b", 0), ("Resize", "raised", 3)]
