"""The whole model in one process: a plain loop over the micro-batches, without any of the engine's passes.

Called by the proof, on the first ranks, and on every rank if outputs must be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.task.randomness import seed_everything
from shoal_workers.engine.task.task import LoadedTask
from shoal_workers.tasks.feed_forward import forget_load, share_of_step


@dataclass(frozen=True, slots=True)
class Whole:
    """What a step over the global batch gives, before the update."""

    loss: float
    metrics: dict[str, float]
    gradients: dict[str, Tensor | None]
    """By name, without tied names; None: the step does not reach it."""


def run_whole(model: nn.Module, task: LoadedTask, spec: JobSpec, batches: Batches, own: Sequence[int]) -> Whole:
    """Forward and backward passes of some micro-batches, one after the other: their shares of the step's mean.

    Each begins with the buffers of the step's begin, as in training."""
    num = spec.batch.num_micro_batches
    buffers = [
        (module, key, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    loss, metrics = 0.0, dict[str, float]()
    forget_load(model)
    for index in own:
        for module, key, value in buffers:  # a forward pass may also have put another tensor there
            module._buffers[key] = value.clone()
        share_of_step(model, 1 / num)
        seed_everything(randomness_seed(spec.seed, 0, index))
        returned = task.evaluate(model, batches.training(spec, 0, index))
        torch.autograd.backward(returned.loss / num)
        loss += float(returned.loss.detach()) / num
        for name, value in returned.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + float(value) / num
    return Whole(loss, metrics, {name: one.grad for name, one in model.named_parameters() if one.requires_grad})
