"""First come, first served: what is started, grown and refused, worked out by hand; and what always holds."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from schedulers import first_come
from shoal_service.core.scheduling.market import (
    Decision,
    MarketJob,
    MarketNode,
    MarketState,
    Preempt,
    Resize,
    Start,
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

    def test_without_nodes_everything_waits(self) -> None:
        assert _brief(decide([_job("a"), _job("b", at=1)], [])) == [("Wait", "a", 0), ("Wait", "b", 0)]


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

    def test_what_a_raised_job_waits_for_is_not_given_away(self) -> None:
        jobs = [_job("raised", 3, 4, granted=1), _job("other", 1, 1, granted=1), _job("b", at=2)]
        assert _brief(decide(jobs, _nodes(3))) == [("Wait", "b", 0)]

    def test_a_job_that_lost_a_node_keeps_its_claim_and_no_job_grows(self) -> None:
        jobs = [_job("a", 1, 4, granted=4), _job("c", 1, 8, granted=1)]
        assert decide(jobs, _nodes(3)) == []

    def test_a_leaving_job_keeps_its_grant_and_gets_no_more(self) -> None:
        assert decide([_job("a", 1, 4, granted=2, leaving=True)], _nodes(4)) == []
        assert decide([_job("a", 1, 1, granted=2, leaving=True)], _nodes(4)) == []


@st.composite
def _demands(draw: st.DrawFn) -> list[MarketJob]:
    jobs = []
    for i in range(draw(st.integers(0, 8))):
        low = draw(st.integers(1, 5))
        jobs.append(
            _job(
                f"j{i}",
                low,
                low + draw(st.integers(0, 5)),
                granted=draw(st.sampled_from([0, 0, 1, 3])),
                priority=draw(st.integers(-1, 1)),
                at=float(draw(st.integers(0, 3))),
                leaving=draw(st.booleans()) and draw(st.booleans()),
            )
        )
    return jobs


_CLUSTERS = st.lists(
    st.builds(MarketNode, node_id=st.uuids().map(str), cpus=st.sampled_from([1.0, 4.0, 8.0])),
    max_size=5,
)


@given(_demands(), _CLUSTERS)
def test_decisions_never_promise_more_than_there_is(jobs: list[MarketJob], nodes: list[MarketNode]) -> None:
    by_id = {job.job_id: job for job in jobs}
    decisions = decide(jobs, nodes)
    assert len({d.job_id for d in decisions}) == len(decisions)
    added: dict[str, int] = {}
    for decision in decisions:
        job = by_id[decision.job_id]
        match decision:
            case Start(workers=workers):
                assert job.granted == 0 and job.min_workers <= workers <= job.max_workers
                added[job.job_id] = workers
            case Resize(workers=workers):
                assert job.granted > 0 and not job.is_leaving
                assert workers != job.granted and workers <= job.max_workers
                added[job.job_id] = max(0, workers - job.granted)
            case Wait():
                assert job.granted == 0
    assert {j.job_id for j in jobs if not j.granted and not j.is_leaving} == {
        d.job_id for d in decisions if isinstance(d, Start | Wait)
    }
    total, held, new = sum(node.cpus for node in nodes), sum(job.granted for job in jobs), sum(added.values())
    assert new <= max(0, total - held)


@given(_demands(), _CLUSTERS)
def test_decisions_do_not_depend_on_the_order_of_their_inputs(jobs: list[MarketJob], nodes: list[MarketNode]) -> None:
    assert decide(jobs, nodes) == decide(jobs[::-1], nodes[::-1])


@given(_demands(), _CLUSTERS)
def test_carrying_decisions_out_comes_to_rest(jobs: list[MarketJob], nodes: list[MarketNode]) -> None:
    for _ in range(30):
        changes = {d.job_id: d.workers for d in decide(jobs, nodes) if not isinstance(d, Wait | Preempt)}
        if not changes:
            return
        jobs = [replace(job, granted=changes.get(job.job_id, job.granted)) for job in jobs]
    raise AssertionError(f"still changing: {changes}")
