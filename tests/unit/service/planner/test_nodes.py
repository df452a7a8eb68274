"""A planned layout fits the nodes of the workers: all of its tp groups have room inside them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_service.core.hardware_profile import Racks
from shoal_service.planner import Prediction, plan, rank
from shoal_workers.contract.checks.spec_errors import parse_spec

LARGE: dict[str, Any] = {
    "data": {"corpus": "python-stdlib"},
    "stop": {"steps": 1},
    "model": {"dim": 8192, "num_layers": 16, "num_heads": 16, "seq_len": 2048},
    "batch": {"global_size": 2, "micro_size": 1},
    "worker": {"gpus": 1},
}
DEEP: dict[str, Any] = {
    **LARGE,
    "model": {"dim": 4096, "num_layers": 32, "num_heads": 32, "seq_len": 4096},
    "batch": {"global_size": 16, "micro_size": 1},
}
WIDE = {
    **LARGE,
    "model": {"dim": 32_768, "num_layers": 1, "num_heads": 64, "seq_len": 2048},
    "batch": {"global_size": 1, "micro_size": 1},
}


def test_whole_nodes_and_unknown_nodes_give_the_same_plan() -> None:
    spec = parse_spec(LARGE)
    assert plan(spec, 16, None, ((8, 8),)) is plan(spec, 16)


def test_the_axes_beside_tp_are_compared_with_the_links_that_they_cross() -> None:
    spec = parse_spec(LARGE)
    layouts = {
        nodes: plan(spec, 8, None, (nodes,)).layout.describe() for nodes in [(8,), (4, 4), (2, 2, 2, 2), (1,) * 8]
    }
    assert layouts == {(8,): "fsdp2 x tp4", (4, 4): "pp2 x tp4", (2, 2, 2, 2): "pp4 x tp2", (1,) * 8: "pp8"}


@pytest.mark.parametrize(
    ("racks", "of_large", "of_deep"),
    [
        (((16,),), "fsdp2 x cp2 x tp4", "fsdp16"),
        (((8, 8),), "pp2 x cp2 x tp4", "fsdp16"),
        (((4, 4, 4, 4),), "pp4 x tp4", "fsdp16"),
        (((1,) * 16,), "pp8 x cp2", "pp8 x fsdp2"),
        (((1,) * 8, (1,) * 8), "pp8 x cp2", "pp4 x fsdp4"),
    ],
)
def test_16_workers_get_the_layout_for_their_nodes_and_racks(racks: Racks, of_large: str, of_deep: str) -> None:
    """The axes that communicate most stay inside nodes. Over racks, each with one of two halves of a pipeline, sums of
    gradients cost less than the longer pipeline."""
    assert [plan(parse_spec(one), 16, None, racks).layout.describe() for one in (LARGE, DEEP)] == [of_large, of_deep]


def test_of_uneven_nodes_the_smallest_piece_of_a_group_counts() -> None:
    layouts = [plan(parse_spec(DEEP), 8, None, racks).layout.describe() for racks in (((8,),), ((3, 5),), ((3,), (5,)))]
    assert layouts == ["fsdp8", "fsdp8", "pp8"]
    steps = [
        rank(parse_spec(DEEP), 8, None, 1, racks).predictions[0].step_s for racks in (((8,),), ((4, 4),), ((3, 5),))
    ]
    assert steps == sorted(steps)


def test_on_one_node_every_plan_is_that_of_unknown_nodes() -> None:
    for document in (LARGE, DEEP, WIDE):
        spec = parse_spec(document)
        for world in range(1, 9):
            known, unknown = plan(spec, world, None, ((world,),)), plan(spec, world)
            assert (known.layout, known.rank_bytes) == (unknown.layout, unknown.rank_bytes)


def test_a_fixed_tp_is_used_although_it_crosses_nodes() -> None:
    spec = parse_spec({**LARGE, "parallelism": {"tp": 8}, "elasticity": {"max_workers": 8}})
    planned = plan(spec, 8, None, ((4, 4),))
    assert planned.layout.tp == 8 and "tp 8 between nodes, " in planned.reason
    inside = plan(spec, 8, None, ((8,),))
    assert inside.layout == planned.layout and "tp_inside_node: tp 8 inside nodes, " in inside.reason


def test_tp_crosses_nodes_if_nothing_else_fits_into_memory() -> None:
    spec = parse_spec(WIDE)
    of_four, of_two = plan(spec, 8, None, ((4, 4),)), plan(spec, 8, None, ((2, 2, 2, 2),))
    assert of_four.fits and of_four.layout.tp == 4
    assert of_two.fits and of_two.layout.tp > 2
    assert f"tp {of_two.layout.tp} between nodes, " in of_two.reason
    seconds = {racks: _fixed_tp(WIDE, 4, racks).step_s for racks in [((4, 4),), ((2, 2, 2, 2),), ((2, 2), (2, 2))]}
    assert list(seconds.values()) == sorted(set(seconds.values())), "tp costs what it crosses"


def _fixed_tp(document: dict[str, Any], tp: int, racks: Racks) -> Prediction:
    spec = parse_spec(
        {**document, "parallelism": {"tp": tp, "cp": 2}, "elasticity": {"max_workers": 8, "min_workers": 8}}
    )
    return rank(spec, 8, None, 1, racks).predictions[0]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple), st.data())
def test_all_tp_groups_have_room_inside_nodes(nodes: tuple[int, ...], data: st.DataObject) -> None:
    world = data.draw(st.integers(1, sum(nodes)))
    planned = plan(parse_spec(LARGE), world, None, (nodes,))
    layout = planned.layout
    assert layout.world_size <= world
    if planned.fits and plan(parse_spec(LARGE), world, None, ((1,) * world,)).fits:
        assert sum(size // layout.tp for size in nodes) >= layout.world_size // layout.tp
