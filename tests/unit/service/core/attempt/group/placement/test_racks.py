"""Groups stay inside racks where they cannot stay inside nodes, and the data axes cross racks first."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kit.cases import failed_cases
from kit.worlds.placements import layouts_of_16
from shoal_service.core.attempt.placement import Candidate, fewest_crossing, num_crossing, rank_order
from shoal_workers.contract.layout import Layout

RACKS = {"A": "r1", "B": "r2", "C": "r1", "D": "r2"}
WORKERS = [Candidate(i, "ABCD"[i // 4], "ABCD"[i // 4], RACKS["ABCD"[i // 4]]) for i in range(16)]
"""Four nodes of four in two racks; Ray has started the workers on the racks in turn."""


def places(order: Sequence[Candidate], groups: Sequence[Sequence[int]], kind: str) -> int:
    """How many of these groups of ranks are in several places."""
    return sum(len({getattr(order[rank], kind) for rank in group}) > 1 for group in groups)


def groups_of(layout: Layout, axis: str) -> list[list[int]]:
    """The groups of ranks along pp, or the replicas of the model, or the shards of a replica in one stage."""
    stage, ranks = layout.world_size // layout.pp, range(layout.world_size)
    replica = stage // layout.dp_replicate
    key = {
        "pp": lambda rank: rank % stage,
        "replica": lambda rank: rank % stage // replica,
        "shards": lambda rank: (rank // replica, rank % (layout.cp * layout.tp)),
    }[axis]
    found: dict[object, list[int]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return list(found.values())


def test_no_group_that_fits_into_a_rack_crosses_racks() -> None:
    assert failed_cases(check_racks, layouts_of_16(), Layout.describe) == {}


def check_racks(layout: Layout) -> None:
    order = rank_order(WORKERS, [], layout)
    if layout == Layout(dp_shard=16):
        return
    racks = [candidate.rack for candidate in order]
    for size in (layout.tp, layout.tp * layout.cp):
        assert num_crossing(racks, size) == (0 if size <= 8 else 16 // size)
    inner = layout.tp * layout.cp * layout.ep
    if inner * layout.pp <= 8:
        assert places(order, groups_of(layout, "pp"), "rack") == 0
    if inner * layout.pp <= 4:
        assert places(order, groups_of(layout, "pp"), "node") == 0
    if layout.dp_replicate > 1:
        assert places(order, groups_of(layout, "replica"), "rack") == 0, "only the sums over replicas cross racks"


def test_of_uneven_racks_each_takes_the_blocks_that_it_has_nodes_for() -> None:
    nodes = {"A": ("r1", 4), "B": ("r2", 4), "C": ("r2", 4), "D": ("r1", 2)}
    workers = [
        Candidate(10 * i + k, n, n, rack) for i, (n, (rack, size)) in enumerate(nodes.items()) for k in range(size)
    ]
    order = rank_order(workers, [], Layout(pp=2, dp_shard=3, tp=2))
    groups = groups_of(Layout(pp=2, dp_shard=3, tp=2), "pp")
    assert num_crossing([c.node for c in order], 2) == 0
    assert places(order, groups, "rack") == 0 and places(order, groups, "node") == 0


@st.composite
def workers_in_racks(draw: st.DrawFn) -> list[Candidate]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    racks = [draw(st.sampled_from(["", "r1", "r2", "r3"])) for _ in sizes]
    nodes = draw(st.permutations([node for node, size in enumerate(sizes) for _ in range(size)]))
    return [Candidate(i, f"n{node}", f"n{node}", racks[node]) for i, node in enumerate(nodes)]


@given(workers_in_racks(), st.integers(1, 4), st.integers(1, 3), st.data())
def test_racks_cost_no_tp_group_its_node_and_no_survivor_its_rank(
    workers: list[Candidate], tp: int, pp: int, data: st.DataObject
) -> None:
    unit = tp * pp
    if len(workers) < unit:
        return
    layout = Layout(pp=pp, tp=tp, dp_shard=len(workers) // unit)
    order = rank_order(workers, [], layout)
    assert len(set(order)) == layout.world_size
    assert num_crossing([c.node for c in order], tp) == fewest_crossing(workers, layout)
    before = [c.index for c in order]
    assert list(rank_order([*order, *(c for c in workers if c not in order)], before, layout)) == list(order)
    lost = data.draw(st.sampled_from(order))
    spare = Candidate(1000, lost.node, lost.machine, lost.rack)
    usual = [spare if c == lost else c for c in order]
    assert list(rank_order(usual, before, layout)) == usual
