"""A copy is on another node than its source, and all workers store about equally many copies."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.attempt.placement import buddies
from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.contract.messages import WorkerInfo
from shoal_workers.contract.snapshots import SnapshotServer


def infos(*nodes: str, ports: tuple[int, ...] = (), racks: str = "") -> list[WorkerInfo]:
    return [
        WorkerInfo(
            worker_id=f"s{rank}",
            node_id=node,
            node_ip=f"ip-{node}",
            pid=1,
            store_port=1,
            device="cpu",
            snapshot_port=ports[rank] if ports else 100 + rank,
            rack=racks[rank] if racks else "",
        )
        for rank, node in enumerate(nodes)
    ]


def of(workers: list[WorkerInfo], layout: Layout | None = None) -> tuple[SnapshotServer | None, ...]:
    return buddies(workers, layout or fully_sharded(len(workers)))


def ranks_of(*nodes: str) -> list[int | None]:
    return [None if buddy is None else buddy.port - 100 for buddy in of(infos(*nodes))]


def test_a_single_node_has_no_buddies() -> None:
    assert ranks_of("a", "a", "a") == [None, None, None]


def test_a_buddy_is_identified_by_its_snapshot_server() -> None:
    [first, _] = of(infos("a", "b"))
    assert first is not None and (first.node_id, first.host, first.port) == ("b", "ip-b", 101)


def test_a_worker_without_snapshots_is_not_a_buddy() -> None:
    assert [b and b.port for b in of(infos("a", "b", "b", ports=(7, 0, 9)))] == [9, 7, 7]
    assert of(infos("a", "b", ports=(0, 0))) == (None, None)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_never_on_the_same_node_and_never_more_than_needed(nodes: list[str]) -> None:
    chosen = of(infos(*nodes))
    if len(set(nodes)) == 1:
        assert set(chosen) == {None}
        return
    assert all(buddy is not None and buddy.node_id != node for buddy, node in zip(chosen, nodes, strict=True))
    crowd = Counter(nodes)
    copies = Counter(buddy.port for buddy in chosen if buddy is not None)
    fair = max(
        -(-num // (len(nodes) - num)) for num in crowd.values()
    )  # a node's copies, spread over all workers of other nodes
    assert max(copies.values()) <= fair + 1


def chosen_by_search(nodes: list[str], ports: tuple[int, ...]) -> list[int | None]:
    """The rule as it is stated, by a look at every worker for every rank."""
    ring, crowd, copies = list(dict.fromkeys(nodes)), Counter(nodes), Counter[int]()
    chosen: list[int | None] = [None] * len(nodes)
    for rank in sorted(range(len(nodes)), key=lambda r: (-crowd[nodes[r]], r)):
        others = [o for o in range(len(nodes)) if nodes[o] != nodes[rank] and ports[o]]
        if others:
            here = ring.index(nodes[rank])
            best = min(others, key=lambda o: (copies[o], (ring.index(nodes[o]) - here) % len(ring), o))
            copies[best] += 1
            chosen[rank] = ports[best]
    return chosen


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), min_size=1, max_size=24))
def test_the_choice_is_the_one_of_a_search_over_all_workers(workers: list[tuple[str, bool]]) -> None:
    nodes = [node for node, _ in workers]
    ports = tuple(100 + rank if keeps else 0 for rank, (_, keeps) in enumerate(workers))
    assert [b and b.port for b in of(infos(*nodes, ports=ports))] == chosen_by_search(nodes, ports)


def test_a_shard_with_a_replica_on_another_node_needs_no_copy() -> None:
    hybrid = Layout(dp_replicate=2, dp_shard=2)
    assert of(infos("a", "a", "b", "b"), hybrid) == (None,) * 4
    assert [b and b.node_id for b in of(infos("a", "b", "a", "c"), hybrid)] == ["b", None, None, None]


def test_nodes_of_one_machine_are_no_buddies() -> None:
    workers = [
        info.model_copy(update={"machine_id": machine})
        for info, machine in zip(infos("a", "b", "c"), ("m", "m", "n"), strict=True)
    ]
    assert [b and b.node_id for b in of(workers)] == ["c", "c", "a"]
    assert of(workers[:2]) == (None, None)


def racks_of_buddies(nodes: str, racks: str) -> str:
    workers = infos(*nodes, racks=racks)
    rack_of = {info.node_id: info.rack for info in workers}
    return "".join(rack_of[buddy.node_id] for buddy in of(workers) if buddy is not None)


def test_a_buddy_is_in_another_rack() -> None:
    assert racks_of_buddies("abcd", "1122") == "2211"
    assert racks_of_buddies("abcd", "1212") == "2121", "the racks need not be together"
    assert racks_of_buddies("aabbccddeeff", "111122223333") == "222233331111"


def test_a_lone_rack_does_not_get_all_the_copies() -> None:
    """Seven machines of one rack and one of another: it keeps one copy more than the others have to."""
    workers = infos(*"abcdefgh", racks="11111112")
    copies = Counter(buddy.node_id for buddy in of(workers) if buddy is not None)
    assert copies["h"] == 2 and max(copies.values()) == 2 and sum(copies.values()) == 8


@given(st.lists(st.sampled_from(["a1", "b1", "c2", "d2", "e3"]), min_size=1, max_size=14))
def test_racks_cost_at_most_one_copy_more(places: list[str]) -> None:
    nodes, racks = [place[0] for place in places], "".join(place[1] for place in places)
    chosen, without = of(infos(*nodes, racks=racks)), of(infos(*nodes))
    assert all(buddy is None or buddy.node_id != node for buddy, node in zip(chosen, nodes, strict=True))
    most, fewest = (max(Counter(b and b.port for b in side).values(), default=0) for side in (chosen, without))
    assert [b is None for b in chosen] == [b is None for b in without] and most <= fewest + 1
