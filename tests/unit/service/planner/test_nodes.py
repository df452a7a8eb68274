"""A planned layout fits the nodes of the workers: all of its tp groups have room inside them."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_service.planner import plan
from shoal_workers.contract.checks.spec_errors import parse_spec

LARGE: dict[str, Any] = {
    "data": {"corpus": "python-stdlib"},
    "stop": {"steps": 1},
    "model": {"dim": 8192, "num_layers": 16, "num_heads": 16, "seq_len": 2048},
    "batch": {"global_size": 2, "micro_size": 1},
    "worker": {"gpus": 1},
}
WIDE = {
    **LARGE,
    "model": {"dim": 32_768, "num_layers": 1, "num_heads": 64, "seq_len": 2048},
    "batch": {"global_size": 1, "micro_size": 1},
}


def test_whole_nodes_and_unknown_nodes_give_the_same_plan() -> None:
    spec = parse_spec(LARGE)
    assert plan(spec, 16, None, (8, 8)) is plan(spec, 16)


def test_the_axes_beside_tp_are_compared_with_the_links_that_they_cross() -> None:
    spec = parse_spec(LARGE)
    layouts = {nodes: plan(spec, 8, None, nodes).layout.describe() for nodes in [(8,), (4, 4), (2, 2, 2, 2), (1,) * 8]}
    assert layouts == {(8,): "fsdp2 x tp4", (4, 4): "pp2 x tp4", (2, 2, 2, 2): "pp4 x tp2", (1,) * 8: "pp8"}


def test_a_fixed_tp_is_used_although_it_crosses_nodes() -> None:
    spec = parse_spec({**LARGE, "parallelism": {"tp": 8}, "elasticity": {"max_workers": 8}})
    assert plan(spec, 8, None, (4, 4)).layout.tp == 8


def test_tp_crosses_nodes_if_nothing_else_fits_into_memory() -> None:
    spec = parse_spec(WIDE)
    of_four, of_two = plan(spec, 8, None, (4, 4)), plan(spec, 8, None, (2, 2, 2, 2))
    assert of_four.fits and of_four.layout.tp == 4
    assert of_two.fits and of_two.layout.tp > 2


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple), st.data())
def test_all_tp_groups_have_room_inside_nodes(nodes: tuple[int, ...], data: st.DataObject) -> None:
    world = data.draw(st.integers(1, sum(nodes)))
    planned = plan(parse_spec(LARGE), world, None, nodes)
    layout = planned.layout
    assert layout.world_size <= world
    if planned.fits and plan(parse_spec(LARGE), world, None, (1,) * world).fits:
        assert sum(size // layout.tp for size in nodes) >= layout.world_size // layout.tp
