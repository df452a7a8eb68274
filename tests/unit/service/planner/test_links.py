"""The classes of links of each axis are those of the real order of the ranks, on nodes and racks of many sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.worlds.placements import layouts_of_16
from shoal_service.core.attempt.placement import Candidate, rank_order
from shoal_service.core.hardware_profile import HardwareProfile, LinkClass, Racks
from shoal_service.planner.candidates import Candidates
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.links import network
from shoal_workers.contract.layout import Layout

CLASSES = INSIDE, NODES, RACKS = LinkClass.INSIDE_NODE, LinkClass.BETWEEN_NODES, LinkClass.BETWEEN_RACKS
H100 = PROFILES["h100"]
WORLDS: list[Racks] = [
    ((16,),),
    ((8, 8),),
    ((4, 4, 4, 4),),
    ((4, 4), (4, 4)),
    ((2,) * 8,),
    ((2, 2, 2, 2), (2, 2, 2, 2)),
    ((1,) * 16,),
    ((8,), (4, 4)),
    ((3, 5), (8,)),
    ((3, 5, 8),),
]
"""16 workers each."""


def predicted(layout: Layout, racks: Racks, profile: HardwareProfile) -> dict[str, LinkClass]:
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    others = ("level", "schedule", "per_rank", "recompute", "context", "cut", "fed")
    degrees: dict[str, Any] = {name: np.array([getattr(layout, name)]) for name in names}
    columns = Candidates(**degrees, **dict.fromkeys(others, np.array([1])), cuts=())
    return network(columns, profile, racks).spans.classes(0)


def workers_on(racks: Racks) -> list[Candidate]:
    """Started on the nodes in turn, as Ray may do it."""
    places = [(f"r{r}", f"r{r}n{n}", size) for r, rack in enumerate(racks) for n, size in enumerate(rack)]
    turns = [(turn, rack, node) for rack, node, size in places for turn in range(size)]
    return [Candidate(i, node, node, rack) for i, (_, rack, node) in enumerate(sorted(turns))]


def real(layout: Layout, racks: Racks) -> dict[str, LinkClass]:
    order = rank_order(workers_on(racks), [], layout)
    return {
        axis: max((_crossed(order, group) for group in groups), key=CLASSES.index) for axis, groups in _groups(layout)
    }


def _crossed(order: Sequence[Candidate], ranks: Sequence[int]) -> LinkClass:
    if len({order[rank].rack for rank in ranks}) > 1:
        return RACKS
    return NODES if len({order[rank].node for rank in ranks}) > 1 else INSIDE


def _groups(layout: Layout) -> Iterator[tuple[str, list[list[int]]]]:
    """The ranks of each group of each axis with more than one rank."""
    shape = (layout.pp, layout.dp_replicate, layout.dp_shard // layout.ep, layout.ep, layout.cp, layout.tp)
    ranks = np.arange(layout.world_size).reshape(shape)
    axes = {"pp": (0,), "dp_replicate": (1,), "dp_shard": (2, 3, 4), "ep": (3,), "cp": (4,), "tp": (5,)}
    for axis, dims in axes.items():
        size = int(np.prod([shape[dim] for dim in dims]))
        if size > 1:
            rest = [dim for dim in range(6) if dim not in dims]
            yield axis, ranks.transpose(*rest, *dims).reshape(-1, size).tolist()


@pytest.mark.parametrize("racks", WORLDS, ids=str)
def test_the_classes_are_those_of_the_real_order(racks: Racks) -> None:
    for layout in layouts_of_16():
        assert predicted(layout, racks, H100) == real(layout, racks), layout.describe()


def test_on_one_node_no_axis_leaves_it() -> None:
    for layout in layouts_of_16():
        assert set(predicted(layout, ((16,),), H100).values()) <= {INSIDE}


def test_without_known_nodes_the_profile_says_their_size() -> None:
    for layout in layouts_of_16():
        assert predicted(layout, (), H100) == predicted(layout, ((8, 8),), H100)


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
)
def test_no_class_is_faster_than_the_real_one_if_all_workers_train(
    sizes: list[list[int]], degrees: tuple[int, int, int, int]
) -> None:
    (tp, cp, pp, ep), workers = degrees, sum(map(sum, sizes))
    unit = tp * cp * pp * ep
    if workers % unit == 0:
        layout, racks = Layout(tp=tp, cp=cp, pp=pp, ep=ep, dp_shard=workers // unit * ep), tuple(map(tuple, sizes))
        found = real(layout, racks)
        for axis, link in predicted(layout, racks, H100).items():
            assert CLASSES.index(link) >= CLASSES.index(found[axis]), axis
