"""The copies of a task's model that a proof compares: equal on every rank, small, without dropout, and with no weight
that hides a fault.

A new model hides faults: a bias of zero has no effect, and a last layer of zeros stops all gradients before it. So
each parameter gets a little noise, the same in every copy. Called by the proof on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.contract.pipeline_feed import num_stages
from shoal_workers.contract.spec import JobSpec, Precision
from shoal_workers.engine.model.fast_build import build_for_restore

LARGEST = 50_000_000
"""Parameters of a model that is proven whole."""
_LARGEST_SHRUNK = 500_000_000
"""Of one without most of its blocks: each copy takes 8 bytes for each."""
_NOISE = 0.02
_STREAM = 0x50524F4F
"""Separates these random numbers from all others."""
_SAMPLES = 2
"""Of a micro-batch: one sample would hide what mixes samples."""
_DROPOUTS = ("dropout", "drop_prob", "dropout_p", "attention_dropout", "hidden_dropout", "resid_dropout", "p_dropout")


def spec_of_proof(spec: JobSpec, num_micro_batches: int) -> JobSpec:
    """The same task in fp32, so that rounding does not hide or make a difference, with a small global batch."""
    micro_size = min(spec.batch.micro_size, _SAMPLES)
    batch = spec.batch.model_copy(update={"micro_size": micro_size, "global_size": micro_size * num_micro_batches})
    return spec.model_copy(
        update={
            "batch": batch,
            "precision": Precision.FP32,
            "reduce_precision": Precision.FP32,
            "deterministic": False,
            "compile": False,
        }
    )


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
    """What is left out of a model that is too large to be proven whole; None: nothing. Needs no communication.

    Raises:
        TooLarge: it cannot be made smaller, or not enough.
    """
    model = build_for_restore(build)
    total = _num_parameters(model)
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
    left = total - sum(_num_parameters(block) for number, block in enumerate(blocks) if number not in kept)
    if left > _LARGEST_SHRUNK:
        raise TooLarge(f"it has {total:,} parameters, and {left:,} with {len(kept)} blocks")
    return Shrunk(plan.blocks, kept)


class TooLarge(Exception):
    """The model cannot be proven on this machine; the message continues `the model is too large: `."""


def copy_of(
    build: Callable[[], nn.Module], seed: int, device: torch.device, smaller: Shrunk | None = None
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


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _switch_off_dropout(model: nn.Module) -> None:
    """Ranks that hold parts of an activation draw other masks than a process that holds it whole."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _DROPOUTS:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
