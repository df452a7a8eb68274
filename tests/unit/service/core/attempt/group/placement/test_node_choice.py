"""New workers go to few nodes, tp groups stay inside nodes, and growth goes beside the workers that are there."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.attempt.placement import NodeRoom, choose_node
from shoal_workers.contract.placing import Placement

PACK, SPREAD = Placement.PACK, Placement.SPREAD


def places(nodes: str, num: int, *, tp: int = 1, placement: Placement = PACK) -> str:
    """The nodes that `choose_node` chooses for `num` workers, which are placed one after the other: "AAB" is two on A,
    then one on B; "-" is no node. `nodes`: "A2+1" is node A with room for 2 more workers, and with 1 worker on it."""
    rooms: dict[str, list[int]] = {}
    for text in nodes.split():
        room, _, held = text[1:].partition("+")
        rooms[text[0]] = [int(room), int(held or 0)]
    found = ""
    for missing in range(num, 0, -1):
        nodes_now = [NodeRoom(name, room, held) for name, (room, held) in rooms.items()]
        chosen = choose_node(nodes_now, num_missing=missing, tp=tp, placement=placement)
        found += chosen or "-"
        if chosen:
            rooms[chosen][0] -= 1
            rooms[chosen][1] += 1
    return found


@pytest.mark.parametrize(
    ("nodes", "num", "tp", "expected"),
    [
        ("A2 B2", 4, 1, "AABB"),
        ("A2 B2", 4, 2, "AABB"),
        ("A8 B4 C2", 4, 1, "BBBB"),  # one node holds them all, with nothing to spare
        ("A3 B4", 4, 2, "BBBB"),
        ("A3 B3", 4, 2, "AABB"),  # a third one on A would be half of a group
        ("A5 B3", 6, 2, "AAAABB"),
        ("A4 B2+2", 2, 1, "BB"),  # beside the others
        ("A4 B1+3", 2, 1, "BA"),
        ("A4 B2+1", 1, 2, "B"),  # completes a group
        ("A4 B1+2", 2, 2, "AA"),  # B has room for half of a group
        ("A1 B1", 2, 2, "AB"),  # no node has room for a group
        ("A1 B1", 3, 1, "AB-"),
        ("", 1, 1, "-"),
    ],
)
def test_workers_are_packed(nodes: str, num: int, tp: int, expected: str) -> None:
    assert places(nodes, num, tp=tp) == expected


@pytest.mark.parametrize(
    ("nodes", "num", "expected"),
    [("A4 B4 C4", 4, "ABCA"), ("A4+2 B1 C4", 4, "CBCA"), ("A1 B4", 3, "BAB")],
)
def test_workers_are_spread(nodes: str, num: int, expected: str) -> None:
    assert places(nodes, num, placement=SPREAD) == expected


@given(
    rooms=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    tp=st.sampled_from([1, 2, 3, 4]),
    groups=st.integers(1, 6),
)
def test_no_tp_group_crosses_nodes_if_the_nodes_have_room_for_whole_ones(
    rooms: list[int], tp: int, groups: int
) -> None:
    inside = sum(room // tp for room in rooms)
    groups = min(groups, inside)
    nodes = " ".join(f"{chr(65 + i)}{room}" for i, room in enumerate(rooms))
    placed = Counter(places(nodes, groups * tp, tp=tp))
    assert all(number % tp == 0 for number in placed.values()) and placed["-"] == 0


@given(rooms=st.lists(st.integers(1, 9), min_size=1, max_size=6), num=st.integers(1, 30))
def test_a_job_is_on_as_few_nodes_as_possible(rooms: list[int], num: int) -> None:
    num = min(num, sum(rooms))
    nodes = " ".join(f"{chr(65 + i)}{room}" for i, room in enumerate(rooms))
    fewest = next(n for n in range(1, len(rooms) + 1) if sum(sorted(rooms)[-n:]) >= num)
    assert len(set(places(nodes, num))) == fewest
