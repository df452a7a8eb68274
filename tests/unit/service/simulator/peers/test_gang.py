"""FIFO and SRTF with rigid jobs, worked out by hand."""

from __future__ import annotations

from kit.market_traces import FREE, market, trace_job
from shoal_service.simulator.capacity import Capacity
from shoal_service.simulator.engine import Market, simulate
from shoal_service.simulator.peers.registry import PEERS

JOBS = [
    trace_job("long", work=120, asked=3),
    trace_job("wide", submit_s=10, work=40, asked=4),
    trace_job("short", submit_s=20, work=10, asked=1),
]


def test_fifo_lets_nobody_pass() -> None:
    """`short` would fit beside `long`, and waits behind `wide`."""
    run = simulate(JOBS, PEERS["fifo-gang"].build(JOBS), market(4))
    assert [job.history for job in run.jobs] == [[(0, 3), (40, 0)], [(40, 4), (50, 0)], [(50, 1), (60, 0)]]


def test_srtf_preempts_for_the_shortest_remaining_time() -> None:
    """At 10 s `wide` needs 10 s and `long` 30 s; at 20 s `short` (10 s) and `long` (30 s) fit together."""
    run = simulate(JOBS, PEERS["srtf-gang"].build(JOBS), market(4))
    assert [job.history for job in run.jobs] == [
        [(0, 3), (10, 0), (20, 3), (50, 0)],
        [(10, 4), (20, 0)],
        [(20, 1), (30, 0)],
    ]
    assert [job.num_preemptions for job in run.jobs] == [1, 0, 0]


def test_fifo_preempts_the_newest_when_nodes_leave() -> None:
    jobs = [trace_job("a", work=100, asked=2), trace_job("b", submit_s=1, work=100, asked=2)]
    capacity = Capacity(1, ((0.0, 4), (10.0, 3), (20.0, 4)))
    a, b = simulate(jobs, PEERS["fifo-gang"].build(jobs), Market(capacity=capacity, costs=FREE)).jobs
    assert a.history == [(0, 2), (50, 0)]
    assert b.history == [(1, 2), (10, 0), (20, 2), (61, 0)]
