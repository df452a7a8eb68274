from __future__ import annotations

from shoal_service.control.market.drain_times import DrainTimes
from shoal_service.core.nodes import Drain, Node


def node(*, drained: bool, alive: bool = True) -> Node:
    drain = Drain(reason="r", requested_at=1.0, source="api") if drained else None
    return Node(node_id="n1", ip="10.0.0.1", alive=alive, cpus=4.0, gpus=0.0, memory_gib=8.0, drain=drain)


HERE, GONE = {"job-a": {"n1": 2}}, {"job-a": {"n2": 2}}


def test_a_drain_is_measured_until_no_worker_is_left() -> None:
    times = DrainTimes()
    assert times.observe([node(drained=False)], HERE, 1.0) == {}
    assert times.observe([node(drained=True)], HERE, 2.0) == {}
    assert times.observe([node(drained=True)], HERE, 5.0) == {}
    assert times.observe([node(drained=True)], GONE, 6.5) == {"n1": 4.5}
    assert times.observe([node(drained=True)], GONE, 9.0) == {}, "once"


def test_an_undone_drain_a_dead_node_and_an_empty_one_count_for_nothing() -> None:
    for last in (node(drained=False), node(drained=True, alive=False)):
        times = DrainTimes()
        times.observe([node(drained=True)], HERE, 2.0)
        assert times.observe([last], GONE, 3.0) == {}
    assert DrainTimes().observe([node(drained=True)], GONE, 3.0) == {}
