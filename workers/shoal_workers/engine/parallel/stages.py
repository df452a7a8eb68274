"""The pipeline axis: splits a model into stages, each with placeholders for the modules of the others.

    model             embedding  block 0  block 1  block 2  block 3  norm  head
    stage 0 of 2      embedding  block 0  block 1     .        .       .     .
    stage 1 of 2          .         .        .     block 2  block 3  norm  head

The model's own forward runs in every stage (see stage_forward.py), and the names of parameters are those of the whole
model. Called by `assemble` and by `PipelinePasses`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.engine.parallel.stage_forward import Elsewhere, StageForward
from shoal_workers.engine.parallel.ties import shallow_copy, untie_parts


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline."""

    index: int
    module: nn.Module
    forward_pass: StageForward | None = None
    """None: the model is not split into stages."""


def split_into_stages(model: nn.Module, plan: ParallelPlan, layout: Layout, pipeline_rank: int) -> list[Stage]:
    """The stages of one pipeline rank, in order. `model` must not be used afterwards: the stages share its modules."""
    stages = all_stages(model, plan, layout)
    own = [stages[index] for index in stages_of(layout, pipeline_rank, len(stages))]
    untie_parts([stage.module for stage in own])
    return own


def all_stages(model: nn.Module, plan: ParallelPlan, layout: Layout) -> dict[int, Stage]:
    """Every stage of the pipeline by index; they share the modules of `model`, and its parameters."""
    sizes = stage_sizes(layout, plan.num_blocks)
    blocks = [f"{plan.blocks}.{number}" for number in range(plan.num_blocks)]
    stages = {}
    for index, size in enumerate(sizes):
        begin = sum(sizes[:index])
        own, before, after = blocks[begin : begin + size], blocks[:begin], blocks[begin + size :]
        forward_pass = StageForward(index, len(sizes), tuple(own), plan.last)
        if before:
            forward_pass.set_entrance(before[-1])
        earlier = {*before, *(plan.first if index else ())}
        later = {*after, *(plan.last if index < len(sizes) - 1 else ())}
        module = _without(model, earlier, later, "", forward_pass)
        forward_pass.take_over(module)
        stages[index] = Stage(index, module, forward_pass)
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


def _without(
    module: nn.Module, earlier: Collection[str], later: Collection[str], prefix: str, forward_pass: StageForward
) -> nn.Module:
    """`module` itself if another stage has none of its submodules, else a copy of it with other children."""
    if not any(name.startswith(prefix) for name in (*earlier, *later)):
        return module
    clone = shallow_copy(module)
    for name, child in module._modules.items():
        full_name = prefix + name
        if child is None:
            continue
        if full_name in earlier or full_name in later:
            clone._modules[name] = Elsewhere(forward_pass, full_name, child, is_earlier=full_name in earlier)
        else:
            clone._modules[name] = _without(child, earlier, later, f"{full_name}.", forward_pass)
    return clone
