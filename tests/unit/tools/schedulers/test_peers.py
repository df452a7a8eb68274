"""Peers, for elastic and for rigid jobs: how they divide a few workers, worked out by hand."""

import pytest

from kit.market_traces import FREE, market, trace_job
from schedulers import POLICIES, concave_rates, elastic_srpt, max_min, optimus
from shoal_service.core.scheduling.market import (
    MarketJob,
    MarketNode,
    MarketState,
    Policy,
    Start,
    ThroughputCurve,
)
from shoal_service.simulator.engine import Market, simulate
from shoal_service.simulator.traces import WORKER, Capacity

SQUARE_ROOT = ThroughputCurve((1, 2, 3, 4, 5, 6), (1.0, 1.414, 1.732, 2.0, 2.236, 2.449))


def _job(
    name: str, left: float, *, workers: tuple[int, int] = (1, 6), curve: ThroughputCurve = SQUARE_ROOT
) -> MarketJob:
    at = float(ord(name))
    return MarketJob(
        job_id=name,
        submitted_at=at,
        min_workers=workers[0],
        max_workers=workers[1],
        need=WORKER,
        left=left,
        curve=curve,
    )


def _started(policy: Policy, workers: int, *jobs: MarketJob) -> dict[str, int]:
    nodes = [MarketNode(node_id=f"n{number}", cpus=1.0) for number in range(workers)]
    found = policy(MarketState(jobs=jobs, nodes=nodes), 1000.0)
    assert {decision.job_id for decision in found} == {job.job_id for job in jobs}
    return {decision.job_id: decision.workers for decision in found if isinstance(decision, Start)}


@pytest.mark.parametrize("policy", [max_min, optimus, elastic_srpt])
def test_minima_come_first_and_the_oldest_before_the_others(policy: Policy) -> None:
    jobs = [_job("a", 10, workers=(2, 6)), _job("b", 10, workers=(3, 6)), _job("c", 10)]
    assert _started(policy, 3, *jobs) == {"a": 2, "c": 1}


def test_max_min_gives_equal_numbers_up_to_each_maximum() -> None:
    assert _started(max_min, 10, _job("a", 1), _job("b", 1, workers=(1, 2)), _job("c", 1)) == {"a": 4, "b": 2, "c": 4}
    assert _started(max_min, 5, _job("a", 1), _job("b", 1)) == {"a": 3, "b": 2}


def test_optimus_gives_to_the_long_job_until_it_saves_no_more_than_the_short_one() -> None:
    """The second worker saves 1 - 1/1.414 = 0.293 of the time on one worker, the third 0.130, the fourth 0.077:
    with 100 s and 40 s these are 29.3, 13.0 and 7.7 s, and 11.7, 5.2 and 3.1 s."""
    assert _started(optimus, 5, _job("a", 100), _job("b", 40)) == {"a": 3, "b": 2}
    assert _started(optimus, 4, _job("a", 100), _job("b", 40)) == {"a": 3, "b": 1}


def test_elastic_srpt_gives_to_the_short_job_until_it_adds_no_more_than_the_long_one() -> None:
    """The second worker adds 0.414, the third 0.318, the fourth 0.268, the fifth 0.236, divided by what is left."""
    assert _started(elastic_srpt, 5, _job("a", 100), _job("b", 40)) == {"a": 1, "b": 4}
    assert _started(elastic_srpt, 5, _job("a", 100), _job("b", 80)) == {"a": 2, "b": 3}


def test_elastic_srpt_sees_a_step_ahead() -> None:
    """Two workers are no faster than one, four are four times as fast: the first step is worth a third of that."""
    steps = ThroughputCurve((1, 2, 3, 4), (1.0, 1.0, 1.0, 4.0))
    assert concave_rates(steps, 4) == (0, 1, 2, 3, 4)
    assert _started(elastic_srpt, 5, _job("a", 100, workers=(1, 4), curve=steps), _job("b", 100)) == {"a": 4, "b": 1}


JOBS = [
    trace_job("long", work=120, asked=3),
    trace_job("wide", submit_s=10, work=40, asked=4),
    trace_job("short", submit_s=20, work=10, asked=1),
]


def test_srtf_preempts_for_the_shortest_remaining_time() -> None:
    """At 10 s `wide` needs 10 s and `long` 30 s; at 20 s `short` (10 s) and `long` (30 s) fit together."""
    run = simulate(JOBS, POLICIES["srtf-gang"].build(JOBS), market(4))
    assert [job.history for job in run.jobs] == [
        [(0, 3), (10, 0), (20, 3), (50, 0)],
        [(10, 4), (20, 0)],
        [(20, 1), (30, 0)],
    ]
    assert [job.num_preemptions for job in run.jobs] == [1, 0, 0]


def test_fifo_preempts_the_newest_when_nodes_leave() -> None:
    jobs = [trace_job("a", work=100, asked=2), trace_job("b", submit_s=1, work=100, asked=2)]
    capacity = Capacity(1, ((0.0, 4), (10.0, 3), (20.0, 4)))
    a, b = simulate(jobs, POLICIES["fifo-gang"].build(jobs), Market(capacity=capacity, costs=FREE)).jobs
    assert a.history == [(0, 2), (50, 0)]
    assert b.history == [(1, 2), (10, 0), (20, 2), (61, 0)]
