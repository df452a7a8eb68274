"""Ties are found in the model itself, stay ties inside a stage, and are refused where a plan cuts one tensor twice."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from kit.tasks.stage_tasks import BLOCKS, PLAN, Model
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.stages import all_stages, split_into_stages
from shoal_workers.engine.parallel.ties import find_ties, refuse_mixed_cuts, stages_with

_PLAN = ParallelPlan.model_validate(PLAN)
_V = Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1))


def plan(**changes: Any) -> ParallelPlan:
    return ParallelPlan.model_validate({**PLAN, **changes})


def test_every_further_name_of_a_tensor_has_its_first_one() -> None:
    assert find_ties(Model("ends"), _PLAN) == {"head.weight": "embedding.weight"}
    assert find_ties(Model("plain"), _PLAN) == {}
    middle = {"blocks.2.up.weight": "blocks.1.up.weight", "blocks.2.gain": "blocks.1.gain"}
    assert find_ties(Model("middle"), _PLAN) == middle
    shared = find_ties(Model("same_block"), _PLAN)
    assert shared["blocks.3.norm.bias"] == "blocks.1.norm.bias" and len(shared) == 14


def test_the_first_name_does_not_depend_on_the_direction_in_the_plan() -> None:
    reverse = plan(tied={"embedding.weight": "head.weight"})
    assert find_ties(Model("ends"), reverse) == {"head.weight": "embedding.weight"}


@pytest.mark.parametrize(
    ("kind", "tied", "words"),
    [
        ("plain", {"head.weight": "embedding.weight"}, "they are two parameters"),
        ("ends", {"head.weights": "embedding.weight"}, "no parameter head.weights"),
    ],
)
def test_a_plan_that_names_another_tie_than_the_model_has_is_refused(
    kind: str, tied: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        find_ties(Model(kind), plan(tied=tied))


def test_the_stages_of_a_shared_parameter() -> None:
    def shared(kind: str, layout: Layout) -> dict[str, tuple[int, ...]]:
        model = Model(kind)
        stages = {index: stage.module for index, stage in all_stages(model, _PLAN, layout).items()}
        return stages_with(stages, find_ties(model, _PLAN))

    assert shared("ends", Layout(pp=2)) == {"embedding.weight": (0, 1)}
    assert shared("inside", Layout(pp=2)) == {}
    assert shared("inside", Layout(pp=4)) == {"blocks.0.up.weight": (0, 1)}
    assert shared("all", _V)["blocks.0.up.weight"] == tuple(range(BLOCKS))
    assert set(shared("same_block", Layout(pp=2))) == {
        name for name, _ in Model("same_block").blocks.named_parameters("blocks")
    }


def test_a_rank_with_two_stages_has_a_copy_in_each_and_one_tensor_inside_of_each() -> None:
    first, last = split_into_stages(Model("all"), _PLAN, _V, 0)
    assert {id(p) for p in first.module.parameters()}.isdisjoint({id(p) for p in last.module.parameters()})
    with_parameters = {id(module) for module in last.module.modules() if list(module.parameters())}
    assert with_parameters.isdisjoint({id(module) for module in first.module.modules()})
    (stage,) = split_into_stages(Model("all"), _PLAN, Layout(pp=2), 0)
    blocks = stage.module.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    assert blocks.get_parameter("0.up.weight") is blocks.get_parameter("1.up.weight")


@pytest.mark.parametrize(
    ("kind", "tensor", "words"),
    [
        ("ends", {"embedding": "embedding"}, "Give head a style"),
        ("ends", {"head": "head"}, "Give embedding a style"),
        ("square", {"blocks.*.up": "column", "blocks.*.down": "row"}, "split along dim 0, .* split along dim 1"),
        ("inside", {"blocks.0.up": "column", "blocks.0.down": "row"}, "Give blocks.1.up a style"),
    ],
)
def test_a_tie_that_a_plan_cuts_in_two_ways_is_refused(kind: str, tensor: dict[str, str], words: str) -> None:
    model, split = Model(kind), plan(tensor=tensor)
    ties = find_ties(model, split)
    with pytest.raises(ValueError, match=words):
        refuse_mixed_cuts(model, split, ties, tp=2, ep=1)
    refuse_mixed_cuts(model, split, ties, tp=1, ep=1)


def test_a_tie_that_is_cut_in_one_way_is_not_refused() -> None:
    for kind, tensor in (
        ("ends", {"embedding": "embedding", "head": "head"}),
        ("all", {"embedding": "embedding", "head": "head", "blocks.*.up": "column", "blocks.*.down": "row"}),
        ("same_block", {"blocks.*.up": "column", "blocks.*.down": "row"}),
    ):
        model, split = Model(kind), plan(tensor=tensor)
        refuse_mixed_cuts(model, split, find_ties(model, split), tp=2, ep=1)
