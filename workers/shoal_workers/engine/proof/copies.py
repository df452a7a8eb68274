"""The copies of a task's model that a proof compares: equal on every rank, small, without dropout, and with no weight
that hides a fault.

A new model hides faults: a bias of zero has no effect, and a last layer of zeros stops all gradients before it. So
each parameter gets a little noise, the same in every copy. Called by the proof on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.spec import JobSpec, Precision

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


def copy_of(build: Callable[[], nn.Module], seed: int, device: torch.device) -> nn.Module:
    """A copy of the model that `build` makes, in training mode. The same values on every rank and in every copy."""
    model = build().to(device)
    _switch_off_dropout(model)
    generator = torch.Generator().manual_seed(randomness_seed(seed ^ _STREAM, 0, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                noise = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-1, 1, generator=generator)
                parameter.add_(noise.to(parameter.device, parameter.dtype), alpha=_NOISE)
    model.train()
    return model


def _switch_off_dropout(model: nn.Module) -> None:
    """Ranks that hold parts of an activation draw other masks than a process that holds it whole."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _DROPOUTS:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
