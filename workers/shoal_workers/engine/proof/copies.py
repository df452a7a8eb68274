"""What a proof trains in place of the job's model: a small copy, the same on every rank, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.fault_tolerance import HealthSpec, NonFinitePolicy
from shoal_workers.contract.layout import Layout, num_stages
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.schedules import ScheduleSpec
from shoal_workers.contract.spec import JobSpec, Precision, StopSpec
from shoal_workers.engine.group.collectives import CollectiveLog
from shoal_workers.engine.model.fast_build import build_for_restore
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.task.user_code import Remarks
from shoal_workers.torch_internals import Dropout

NUM_STEPS = 2
LARGEST = 50_000_000
"""Parameters of a model that is proven whole."""
_LARGEST_SHRUNK = 500_000_000
"""Parameters of a model that is proven without most of its blocks: each copy takes 8 bytes for each parameter."""
_NOISE = 0.02
_STREAM = 0x50524F4F
"""Separates these random numbers from all others."""
_SAMPLES = 2
"""Samples of a micro-batch: one alone would hide what mixes samples."""
_MOST_MICRO_BATCHES = 4
"""Micro-batches of a step; beyond it, ranks have padding."""
_DROPOUTS = ("dropout", "drop_prob", "dropout_p", "attention_dropout", "hidden_dropout", "resid_dropout", "p_dropout")


def proof_context(generation: Generation, smaller: Shrunk | None, *, is_mixed: bool = False) -> Generation:
    """Returns the generation for one side of a proof: with a small batch, and with a position, a log and remarks of its
    own. `is_mixed`: see `spec_of_proof`."""
    layout = generation.layout
    note, name = generation.position.note, f"proving the layout {layout.describe()}"
    generation = replace(
        generation,
        spec=spec_of_proof(generation.spec, layout, is_cut=not generation.task.has_batch_loss, is_mixed=is_mixed),
        position=Position(lambda phase, _: note(f"{name}: {phase}")),  # progress: it may take longer than a hang
        outbox=Outbox("proof"),
        collectives=CollectiveLog(),
        remarks=Remarks(),
        readers=None,
    )
    if smaller is None:
        return generation
    num_blocks = len(smaller.kept)
    small = layout.model_copy(update={"stages": (1,) * num_blocks if layout.pp > 1 else ()})
    return replace(
        generation,
        assignment=generation.assignment.model_copy(update={"layout": small}),
        meshes=replace(generation.meshes, layout=small),
        plan=generation.plan.model_copy(update={"num_blocks": num_blocks}),
    )


def spec_of_proof(spec: JobSpec, layout: Layout, *, is_cut: bool = True, is_mixed: bool = False) -> JobSpec:
    """Returns the same task with a small global batch and nothing beside the steps.

    Args:
        is_cut: micro-batches have few samples.
        is_mixed: in the types of the job, bf16 in the place of fp16, whose loss scale may skip the first steps. Else
            in fp32, so that rounding does not hide or make a difference.
    """
    micro_size = min(spec.batch.micro_size, _SAMPLES) if is_cut else spec.batch.micro_size
    num = min(spec.batch.num_micro_batches, max(2, min(layout.num_data_ranks, _MOST_MICRO_BATCHES)))
    return spec.model_copy(
        update={
            "batch": spec.batch.model_copy(update={"micro_size": micro_size, "global_size": micro_size * num}),
            "stop": StopSpec(steps=NUM_STEPS),
            "schedule": ScheduleSpec(name="constant", warmup_steps=0),
            "validation": spec.validation.model_copy(update={"samples": min(spec.validation.samples, 1)}),
            "checkpoint": spec.checkpoint.model_copy(update={"every_s": None}),
            "snapshot": spec.snapshot.model_copy(update={"enabled": False}),
            "health": HealthSpec(non_finite=NonFinitePolicy.SKIP, checksum_every_steps=None),
            "precision": _of_proof(spec.precision) if is_mixed else Precision.FP32,
            "module_precision": {k: _of_proof(one) for k, one in spec.module_precision.items()} if is_mixed else {},
            "reduce_precision": _of_proof(spec.sum_precision) if is_mixed else Precision.FP32,
            "compile": False,
        }
    )


def computes_in(spec: JobSpec) -> frozenset[Precision]:
    """The types in which a task computes or adds up gradients."""
    return frozenset({spec.precision, spec.sum_precision, *spec.module_precision.values()})


def _of_proof(precision: Precision) -> Precision:
    return Precision.BF16 if precision is Precision.FP16 else precision


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A large model without most of its blocks."""

    blocks: str
    """The nn.ModuleList."""
    kept: tuple[int, ...]
    """Numbers of the blocks that stay."""


def shrunk(
    build: Callable[[], nn.Module], plan: ParallelPlan, layout: Layout, *, largest: int = LARGEST
) -> Shrunk | None:
    """What is left out of a model that is too large to be proven whole; None means nothing. Needs no communication.

    Raises:
        TooLarge: it cannot be made smaller, or not enough.
    """
    model = build_for_restore(build)
    total = num_parameters_of(model)
    if total <= largest:
        return None
    blocks = dict(model.named_modules()).get(plan.blocks)
    if not plan.blocks or not isinstance(blocks, nn.ModuleList):
        raise TooLarge(f"it has {total:,} parameters, and its plan names no blocks that could be left out")
    if any(name.startswith(f"{plan.blocks}.") for pair in plan.tied.items() for name in pair):
        raise TooLarge(f"it has {total:,} parameters, and parameters of its blocks are tied")
    num = max(2, num_stages(layout))
    # the first, and the last ones: a mixture of experts may begin with blocks without experts
    kept = tuple(sorted({0, *range(max(0, len(blocks) - num + 1), len(blocks))}))
    left = total - sum(num_parameters_of(block) for number, block in enumerate(blocks) if number not in kept)
    if left > _LARGEST_SHRUNK:
        raise TooLarge(f"it has {total:,} parameters, and {left:,} with {len(kept)} blocks")
    return Shrunk(plan.blocks, kept)


class TooLarge(Exception):
    """The model cannot be proven on this machine; the message continues `the model is too large: `."""


def copy_of(
    build: Callable[[], nn.Module],
    seed: int,
    device: torch.device,
    smaller: Shrunk | None = None,
    *,
    keeps_dropout: bool = False,
) -> nn.Module:
    """A copy of the model that `build` makes, in training mode. The same values on every rank and in every copy."""
    model = build() if smaller is None else build_for_restore(build)
    if smaller is not None:
        blocks = model.get_submodule(smaller.blocks)
        assert isinstance(blocks, nn.ModuleList)
        for number in reversed(range(len(blocks))):
            if number not in smaller.kept:
                del blocks[number]
    model = model.to(device)
    if not keeps_dropout:
        _switch_off_dropout(model)
    generator = torch.Generator().manual_seed(randomness_seed(seed ^ _STREAM, 0, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                noise = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-1, 1, generator=generator)
                noise = noise.to(parameter.device, parameter.dtype)
                if smaller is None:
                    parameter.add_(noise, alpha=_NOISE)
                elif parameter.ndim < 2:  # nothing was drawn: norms begin near one
                    parameter.copy_(1 + _NOISE * noise)
                else:
                    parameter.copy_(noise * (3 / parameter[0].numel()) ** 0.5)
    model.train()
    return model


def num_parameters_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _switch_off_dropout(model: nn.Module) -> None:
    """Ranks that hold parts of an activation draw other masks than a process that holds it whole."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        for name in _DROPOUTS:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
