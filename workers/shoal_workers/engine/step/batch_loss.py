"""A loss of the whole global batch, such as a contrastive one, in which each sample is compared with all others.

    embed       each micro-batch without a graph: what the task's `embed` makes of it
    exchange    every rank gets the embeddings of all samples, in the order of the global batch
    loss        the task's `batch_loss` of all of them, computed by every rank alike, and its gradient by them
    passes      each micro-batch again, with a graph: the sum of its embeddings times that gradient has, by the chain
                rule, the micro-batch's part of the gradient of the loss

After Gao et al. 2021 (GradCache). So the gradient is that of one process that holds the whole batch, at every size and
number of micro-batches, for a second forward pass and the memory of one micro-batch. Both passes of a micro-batch draw
the same random numbers. Called by `LocalPasses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_workers.contract.batch_partition import MicroBatch, randomness_seed
from shoal_workers.contract.messages import Phase
from shoal_workers.engine.parallel.data_axis import DataAxis, OrderVaries
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.buffers import StepBuffers
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.task.randomness import seed_everything
from shoal_workers.engine.task.returned import Returned


class BatchLoss:
    """The losses of one generation's steps on one rank. Training thread only.

    Raises:
        TaskFailed: the layout splits a micro-batch.
    """

    def __init__(self, generation: Generation, model: torch.nn.Module, buffers: StepBuffers, axis: DataAxis) -> None:
        self._generation = generation
        self._model = model
        self._buffers = buffers
        self._axis = axis
        self._own = generation.own_micro_batches()
        self._gradients: Sequence[Tensor | None] = ()
        """By embedding of a floating-point type: the gradient of the loss, of shape (micro-batches, samples of one,
        ...); None if the loss does not depend on it."""
        self._loss = Returned(torch.zeros(()), {})
        layout = generation.layout
        if layout.pp > 1 or layout.cp > 1:
            with generation.user_code:
                raise ValueError(
                    f"the task has embed() and batch_loss(), and the layout {layout.describe()} splits the forward "
                    "pass of a micro-batch over ranks. Set parallelism.pp and parallelism.cp to 1."
                )

    def prepare(self, step: int, batches: Batches) -> None:
        """Computes the loss of the step that follows `step` completed ones. A collective of all data ranks.

        Raises:
            OrderVaries: on all ranks alike.
        """
        generation = self._generation
        self._gradients = ()
        parts: dict[int, tuple[Tensor, ...]] = {}
        for micro_batch in self._own:
            generation.check()
            embedded = self._axis.run("embedding", lambda embedded=micro_batch: self._embed(step, embedded, batches))  # type: ignore[misc]
            if embedded is not None and micro_batch.weight:
                parts[micro_batch.index] = embedded
        if self._axis.any_deviated():
            raise OrderVaries
        embeddings = self._exchanged(parts, embedded)
        seed_everything(randomness_seed(generation.spec.seed, step, generation.spec.batch.num_micro_batches))
        with generation.user_code:
            leaves = [embedding.requires_grad_() for embedding in embeddings if embedding.is_floating_point()]
            self._loss = generation.task.batch_loss([embedding.flatten(0, 1) for embedding in embeddings])
            self._gradients = torch.autograd.grad(self._loss.loss, leaves, allow_unused=True)

    def of(self, batch: Any, micro_batch: MicroBatch) -> Returned:
        """What stands for the loss of a micro-batch: it has the value of the step's loss, and the gradient of the
        micro-batch's part of it. Called after `prepare`, where the task's `loss` would be called."""
        embeddings = [
            tensor for tensor in self._generation.task.embed(self._model, batch) if tensor.is_floating_point()
        ]
        inner = torch.stack(
            [
                (embedding.to(gradient.dtype) * gradient[micro_batch.index]).sum()
                for embedding, gradient in zip(embeddings, self._gradients, strict=True)
                if gradient is not None  # the parameters behind it have none either: no weight decay
            ]
        ).sum()
        # The step's loss is the mean over its micro-batches.
        scaled = inner * self._generation.spec.batch.num_micro_batches
        loss = self._loss.loss.detach() + (scaled - scaled.detach())
        return Returned(loss, self._loss.metrics)

    def _embed(self, step: int, micro_batch: MicroBatch, batches: Batches) -> tuple[Tensor, ...]:
        generation = self._generation
        generation.position.enter(Phase.FORWARD)
        with torch.no_grad(), generation.user_code, self._buffers.unchanged():
            seed_everything(randomness_seed(generation.spec.seed, step, micro_batch.index))
            batch = batches.training(generation.spec, step, micro_batch.index)
            return generation.task.embed(self._model, batch)

    def _exchanged(self, parts: dict[int, tuple[Tensor, ...]], like: Sequence[Tensor] | None) -> list[Tensor]:
        """By embedding, those of all micro-batches. One rank has each and the others zeros, so every sum is exact."""
        assert like is not None
        tensors = []
        for number, template in enumerate(like):
            dtype = (
                torch.promote_types(template.dtype, torch.float32) if template.is_floating_point() else template.dtype
            )
            whole = torch.zeros(
                (self._generation.spec.batch.num_micro_batches, *template.shape), dtype=dtype, device=template.device
            )
            for index, embeddings in parts.items():
                whole[index] = embeddings[number]
            self._generation.meshes.sum_over_data_ranks(whole)
            tensors.append(whole)
        return tensors
