"""When nodes have to be empty for a maintenance window, how early their drain begins, and how long drains take."""

from __future__ import annotations

from shoal_service.control.market.capacity import (
    FIRST_LEAD_S,
    MAX_LEAD_S,
    MIN_LEAD_S,
    DrainTimes,
    combined,
    lead_s,
    window_drains,
    with_windows,
)
from shoal_service.core.nodes import Drain, Node
from shoal_service.fleet_views import MaintenanceWindow

WINDOW = MaintenanceWindow(window_id="mw-1", nodes=("n1", "10.0.0.2"), begins_at=1000.0, ends_at=2000.0, reason="disks")
LATER = WINDOW.model_copy(update={"window_id": "mw-2", "begins_at": 5000.0, "ends_at": 6000.0})


def node(name: str, ip: str = "10.0.0.9") -> Node:
    return Node(node_id=name, ip=ip, alive=True, cpus=4.0, gpus=0.0, memory_gib=8.0)


NODES = [node("n1"), node("n2", "10.0.0.2"), node("n3")]


def drained(now: float) -> set[str]:
    return set(window_drains(NODES, [LATER, WINDOW], 60.0, now))


def test_the_nodes_of_a_window_are_drained_from_the_lead_until_its_end() -> None:
    assert [drained(now) for now in (939.9, 1999.9, 2000.0)] == [set(), {"n1", "n2"}, set()]
    drain = window_drains(NODES, [WINDOW], 60.0, 940.0)["n1"]
    assert (drain.deadline, drain.source, drain.requested_at) == (1000.0, "window", 940.0)
    assert drain.reason == "maintenance window mw-1: disks"


def test_a_drain_that_has_begun_goes_on_when_the_lead_gets_shorter() -> None:
    begun = window_drains(NODES, [WINDOW], FIRST_LEAD_S, 900.0)
    assert window_drains(NODES, [WINDOW], MIN_LEAD_S, 900.0) == {}
    assert window_drains(NODES, [WINDOW], MIN_LEAD_S, 900.0, begun) == begun
    assert window_drains(NODES, [WINDOW], MIN_LEAD_S, 2000.0, begun) == {}, "until the end of the window"
    assert window_drains(NODES, [LATER], MIN_LEAD_S, 900.0, begun) == {}, "or until it is cancelled"


def test_the_lead_is_twice_the_longest_drain_within_bounds() -> None:
    assert lead_s([]) == FIRST_LEAD_S
    assert lead_s([3.0, 40.0, 20.0]) == 80.0
    assert (lead_s([1.0]), lead_s([9e9])) == (MIN_LEAD_S, MAX_LEAD_S)


def test_a_node_knows_when_its_next_drain_for_a_window_begins() -> None:
    def at(now: float) -> list[float | None]:
        return [one.maintenance_at for one in with_windows(NODES, [LATER, WINDOW], 60.0, now)]

    assert at(0.0) == [940.0, 940.0, None]
    assert at(1500.0) == [4940.0, 4940.0, None]
    assert at(7000.0) == [None, None, None]


def test_a_requested_drain_keeps_its_reason_and_gets_the_earlier_deadline() -> None:
    requested = {"n1": Drain(reason="asked", requested_at=1.0, source="api")}
    windows = window_drains(NODES, [WINDOW], 60.0, 950.0)
    both = combined(requested, windows)
    assert (both["n1"].reason, both["n1"].source, both["n1"].deadline) == ("asked", "api", 1000.0)
    assert both["n2"] == windows["n2"]
    early = {"n1": requested["n1"].model_copy(update={"deadline": 970.0})}
    assert combined(early, windows)["n1"].deadline == 970.0


def draining(*, drained: bool, alive: bool = True) -> Node:
    drain = Drain(reason="r", requested_at=1.0, source="api") if drained else None
    return Node(node_id="n1", ip="10.0.0.1", alive=alive, cpus=4.0, gpus=0.0, memory_gib=8.0, drain=drain)


HERE, GONE = {"job-a": {"n1": 2}}, {"job-a": {"n2": 2}}


def test_a_drain_is_measured_until_no_worker_is_left() -> None:
    times = DrainTimes()
    assert times.observe([draining(drained=False)], HERE, 1.0) == {}
    assert times.observe([draining(drained=True)], HERE, 2.0) == {}
    assert times.observe([draining(drained=True)], HERE, 5.0) == {}
    assert times.observe([draining(drained=True)], GONE, 6.5) == {"n1": 4.5}
    assert times.observe([draining(drained=True)], GONE, 9.0) == {}, "once"


def test_an_undone_drain_a_dead_node_and_an_empty_one_count_for_nothing() -> None:
    for last in (draining(drained=False), draining(drained=True, alive=False)):
        times = DrainTimes()
        times.observe([draining(drained=True)], HERE, 2.0)
        assert times.observe([last], GONE, 3.0) == {}
    assert DrainTimes().observe([draining(drained=True)], GONE, 3.0) == {}
