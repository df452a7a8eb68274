"""The pipeline axis: splits a model into stages, each with pass-throughs in the place of other stages' modules.

    model             embedding  block 0  block 1  block 2  block 3  norm  head
    stage 0 of 2      embedding  block 0  block 1     .        .       .     .
    stage 1 of 2          .         .        .     block 2  block 3  norm  head       . returns its first input

So the model's own forward runs in every stage, and the names of parameters are those of the whole model. Called by
`assemble` and by `PipelinePasses`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.engine.parallel.ties import shallow_copy, untie_parts


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline."""

    index: int
    module: nn.Module


class PassThrough(nn.Module):
    """Takes the place of a module that another stage has."""

    def forward(self, first: Any, *_: Any, **__: Any) -> Any:
        return first


def split_into_stages(model: nn.Module, plan: ParallelPlan, layout: Layout, pipeline_rank: int) -> list[Stage]:
    """The stages of one pipeline rank, in order. `model` must not be used afterwards: the stages share its modules."""
    stages = all_stages(model, plan, layout)
    own = [Stage(index, stages[index]) for index in stages_of(layout, pipeline_rank, len(stages))]
    untie_parts([stage.module for stage in own])
    return own


def all_stages(model: nn.Module, plan: ParallelPlan, layout: Layout) -> dict[int, nn.Module]:
    """Every stage of the pipeline by index; they share the modules of `model`, and its parameters."""
    sizes = stage_sizes(layout, plan.num_blocks)
    stages = {}
    for index in range(len(sizes)):
        first = sum(sizes[:index])
        dropped = {f"{plan.blocks}.{n}" for n in range(plan.num_blocks) if not first <= n < first + sizes[index]}
        if index > 0:
            dropped.update(plan.first)
        if index < len(sizes) - 1:
            dropped.update(plan.last)
        stages[index] = _without(model, dropped, "")
    return stages


def stage_sizes(layout: Layout, num_blocks: int) -> tuple[int, ...]:
    """Blocks of each stage; if the layout does not define them, split evenly, with the longer stages first."""
    base, extra = divmod(num_blocks, layout.pp)
    return layout.stages or tuple(base + (index < extra) for index in range(layout.pp))


def stages_of(layout: Layout, pipeline_rank: int, num_stages: int) -> Sequence[int]:
    """The stages of a pipeline rank."""
    if layout.schedule.is_v_shaped:
        return pipeline_rank, num_stages - 1 - pipeline_rank
    return range(pipeline_rank, num_stages, layout.pp)


def owner_of(layout: Layout, stage: int, num_stages: int) -> int:
    """The pipeline rank that has a stage."""
    if layout.schedule.is_v_shaped:
        return min(stage, num_stages - 1 - stage)
    return stage % layout.pp


def _without(module: nn.Module, dropped: Collection[str], prefix: str) -> nn.Module:
    """`module` itself if none of its submodules is dropped, else a copy of it with other children."""
    if not any(name.startswith(prefix) for name in dropped):
        return module
    clone = shallow_copy(module)
    for name, child in module._modules.items():
        full_name = prefix + name
        if full_name in dropped:
            clone._modules[name] = PassThrough()
        elif child is not None:
            clone._modules[name] = _without(child, dropped, f"{full_name}.")
    return clone
