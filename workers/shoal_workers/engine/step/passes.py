"""Forward and backward of one rank's micro-batches without a pipeline: one micro-batch after the other.

    share of a rank     its micro-batches' losses, divided by num_micro_batches, and by the tp and cp ranks that compute
                        the same; the shares of all ranks add up to the mean loss. If losses are sums with weights, so
                        do the shares of the weights to the mean weight, by which the vote's sums are divided

The gradients of all ranks are summed, so autograd differentiates the mean over the global batch, whatever the layout.
The total weight is known only after all forward passes, so gradients of sums are divided by it before the update.
Called by `GradientPass` and `Validation`.

A loss of the whole global batch, such as a contrastive one, compares each sample with all others:

    embed       each micro-batch without a graph: what the task's `embed` makes of it
    exchange    every rank gets the embeddings of all samples, in the order of the global batch
    loss        the task's `batch_loss` of all of them, computed by every rank alike, and its gradient by them
    passes      each micro-batch again, with a graph: the sum of its embeddings times that gradient has, by the chain
                rule, the micro-batch's part of the gradient of the loss

After Gao et al. 2021 (GradCache). So the gradient is that of one process that holds the whole batch, at every size and
number of micro-batches, for a second forward pass and the memory of one micro-batch. Both passes of a micro-batch draw
the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal_workers.contract.batch_partition import MicroBatch, randomness_seed
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.spec import BatchSync
from shoal_workers.engine.deterministic.exact_gradients import ExactGradients
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.cutting import local
from shoal_workers.engine.parallel.data_axis import DataAxis, OrderVaries
from shoal_workers.engine.parallel.global_norm import Exchange
from shoal_workers.engine.randomness import generator_states, seed_everything
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.buffers import StepBuffers
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.task.returned import Returned, Share
from shoal_workers.tasks.feed_forward import set_share_of_step

_VARIES = (
    "The model does not run the same blocks in every micro-batch, so parallelism.shard full cannot gather its "
    "parameters block by block: they stay whole during a step until the group forms again, as with shard gradients."
)


class LocalPasses:
    """Passes of ranks that have all blocks of the model."""

    def __init__(
        self, generation: Generation, assembly: Assembly, exact: ExactGradients | None, buffers: StepBuffers
    ) -> None:
        self._generation = generation
        self._exact = exact
        self._buffers = buffers
        self._user_code = generation.user_code
        self._own = own = generation.own_micro_batches()
        self._is_one_pass = generation.spec.batch.sync is BatchSync.GLOBAL
        """Whether all of them are one pass, because BatchNorm normalises over the global batch."""
        self._real = tuple(micro_batch.index for micro_batch in own if micro_batch.weight) or (own[0].index,)
        if self._is_one_pass:
            self._own = (MicroBatch(self._real[0], sum(micro_batch.weight for micro_batch in own)),)
        (self._model,) = assembly.parts
        self._frozen = [(name, one) for name, one in assembly.named_parameters() if not one.requires_grad]
        (self._axis,) = assembly.data_axes
        self._axis.begin_generation()
        self.has_deviated = False
        """For the vote: in the last `run_micro_batches` with `is_voted`, this rank has left the order of collectives.
        What it has returned and left in `grad` is of no use then, on all ranks, which all `keep_whole` and run the step
        again."""
        # What tp ranks exchange after the passes depends on the gradients that they have.
        self._can_be_voted = exact is None and generation.layout.tp == 1
        if self._is_one_pass:
            if generation.task.has_batch_loss:
                with self._user_code:
                    raise ValueError(
                        "the task has batch_loss(), for which each micro-batch runs twice, and batch.sync is global, "
                        "for which all of them are one pass. Set batch.sync to micro_batch."
                    )
            # a unit that is gathered in the middle of a pass could meet the exchange of a BatchNorm on other ranks
            self._axis.keep_whole()
        if exact is not None:
            self._axis.sum_nothing()
        self._alternation = generation.task.alternation
        if self._alternation is not None:
            _refuse_split(generation)
        self._batch_loss = None
        if generation.task.has_batch_loss:
            self._batch_loss = BatchLoss(generation, self._model, buffers, self._axis)

    def run_micro_batches(self, step: int, batches: Batches, scale: float, *, is_voted: bool = False) -> list[Share]:
        """The shares that this rank's own micro-batches have in the mean over all. Empty if another pipeline rank has
        the losses.

        The gradients, times `scale`, are left where they are collected: in `grad`, or in ExactGradients. `is_voted`: a
        vote follows that tells all ranks of `has_deviated`."""
        is_voted &= self._can_be_voted
        self.has_deviated = False
        self._axis.begin_step()
        try:
            shares = self._run_all(step, batches, scale)
            self.has_deviated = is_voted and self._axis.has_deviated
            varies = not is_voted and self._axis.any_deviated()
        except OrderVaries:
            varies = True
        if varies:
            self.keep_whole()
            shares = self._run_all(step, batches, scale)
        return shares

    def run_forward(self, batch: Any) -> Share:
        """Returns this rank's share in the mean over a whole `batch`, without a gradient.

        Called by all ranks that share the batch; the caller seeds the random generators."""
        kind = f"forward, training {self._model.training}"
        try:
            share = self._axis.run(kind, lambda: self._run_forward(batch))
            varies = self._axis.any_deviated()
        except OrderVaries:
            share, varies = None, True
        if varies:
            self.keep_whole()
            share = self._run_forward(batch)
        assert share is not None
        return share

    def keep_whole(self) -> None:
        """Called by all ranks together: parameters stay whole during a step from now on."""
        self._axis.keep_whole()
        self._axis.begin_step()
        self._buffers.begin()
        if self._exact is not None:
            self._exact.begin()
        self._generation.say(_VARIES)

    def _run_all(self, step: int, batches: Batches, scale: float) -> list[Share]:
        shares: list[Share] = []
        if self._batch_loss is not None:
            self._batch_loss.prepare(step, batches)
        update = "" if self._alternation is None else f" of {self._alternation.name(step)}"
        for count, micro_batch in enumerate(self._own):
            self._generation.check()
            is_last, is_padding = count == len(self._own) - 1, not micro_batch.weight
            if len(self._own) > 1:  # the axis is set up for a single backward pass, which is the last one
                self._axis.prepare_backward(is_last=is_last)
            with self._exact.collecting(is_padding=is_padding) if self._exact else nullcontext():
                run = partial(self._run_forward_backward, step, micro_batch, batches, scale)
                share = self._axis.run(f"training{update}, last {is_last}", run)
            if not is_padding and share is not None:
                shares.append(share)
        self._axis.add_up()
        return shares

    def _run_forward(self, batch: Any) -> Share:
        generation = self._generation
        with torch.no_grad(), self._user_code, self._buffers.unchanged():
            return compute_share(generation, generation.task.evaluate(self._model, batch))

    def _run_forward_backward(self, step: int, micro_batch: MicroBatch, batches: Batches, scale: float) -> Share:
        generation = self._generation
        generation.position.enter(Phase.FORWARD)
        weight = micro_batch.weight / generation.spec.batch.num_micro_batches
        set_share_of_step(self._model, weight * scale)
        if self._is_one_pass:
            with self._user_code:
                return self._run_one_pass(step, micro_batch, batches, scale)
        with self._user_code:
            # Seeded by micro-batch: its draws do not depend on the rank that runs it, or on what ran before.
            seed_everything(randomness_seed(generation.spec.seed, step, micro_batch.index))
            batch = batches.training(generation.spec, step, micro_batch.index)
            with self._buffers.forward(micro_batch), self._axis.in_loss():
                if self._batch_loss is None:
                    returned = generation.task.evaluate_step(self._model, batch, step)
                else:
                    returned = self._batch_loss.evaluate(batch, micro_batch)
            refuse_written(self._axis.written_parameter())
            self._refuse_unfrozen()
            share = compute_share(generation, returned, weight)
            generation.position.enter(Phase.BACKWARD)
            with self._buffers.backward():
                torch.autograd.backward(returned.loss * weight * scale)
        return share

    def _refuse_unfrozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} was frozen when the model was built, and requires a gradient now: gradients of such a "
                    "parameter are not summed over workers, and a new worker would have it frozen. Build it trainable, "
                    "or begin a new job with these weights (init_from) and other optimizer.groups."
                )

    def _run_one_pass(self, step: int, merged: MicroBatch, batches: Batches, scale: float) -> Share:
        """All micro-batches of this rank at once, see global_norm.py."""
        generation = self._generation
        num = generation.spec.batch.num_micro_batches
        batch = batches.training_pass(generation.spec, step, self._real)
        exchange, before = Exchange(self._model, merged, generation.device), generator_states()
        with exchange.running():
            with self._buffers.forward(merged), self._axis.in_loss():
                returned = generation.task.evaluate_step(self._model, batch, step)
                if not torch.equal(before, generator_states()):
                    raise ValueError(
                        "forward() or loss() draws random numbers (dropout, noise), and batch.sync is global: a worker "
                        "computes all of its micro-batches at once, so they would depend on the number of workers. "
                        "Draw them in the data set, whose samples have the numbers of their micro-batch; or set "
                        "dropout to 0, or batch.sync to micro_batch."
                    )
                exchange.end()
            refuse_written(self._axis.written_parameter())
            # A mean counts for all of its micro-batches; a sum has grown with them.
            weight = (merged.weight if returned.weight is None else min(merged.weight, 1.0)) / num
            share = compute_share(generation, returned, weight)
            generation.position.enter(Phase.BACKWARD)
            with self._buffers.backward():
                torch.autograd.backward(returned.loss * weight * scale)
            exchange.end()
        return share


def _refuse_split(generation: Generation) -> None:
    layout = generation.layout
    if max(layout.pp, layout.cp, layout.tp, layout.ep) > 1:
        with generation.user_code:
            raise ValueError(
                f"the task has training_step(), and the layout {layout.describe()} splits the model over ranks. "
                "Alternating updates run on the data axes: set parallelism.pp, cp, tp and ep to 1."
            )


def refuse_written(name: str | None) -> None:
    """Called after a forward pass of the training. Raises ValueError if it has written to a parameter."""
    if name is not None:
        raise ValueError(
            f"forward() or loss() writes to the parameter {name} (as nn.Embedding with max_norm does, or clamp_ under "
            "no_grad). Each worker would have other values, since it sees other samples. Compute with a changed copy "
            "instead (F.normalize, torch.clamp), or change parameters in the step() of an optimizer that "
            "build_optimizer returns. What the optimizer does not have (a teacher that follows the model) is a buffer: "
            "register_buffer(...), whose changes Shoal adds up over the ranks; for an average of the weights there is "
            "optimizer.ema_decay. A job of one worker (elasticity.max_workers: 1) with one micro-batch a step and "
            "no snapshots (snapshot.enabled: false) may write to them, unless its model is sharded "
            "(docs/parallelism.md)."
        )


def compute_share(generation: Generation, returned: Returned, weight: float = 1.0) -> Share:
    """Returns this rank's share of loss and metrics, times the weight of the micro-batch; without a graph."""
    loss = (local(returned.loss).detach() * weight).reshape(()) * generation.layout.loss_share
    if returned.weight is None:
        metrics = {name: value * weight * generation.layout.loss_share for name, value in returned.metrics.items()}
        return Share(loss, metrics)
    share = returned.weight * weight * generation.layout.loss_share
    # A mean over nothing is nan, and must not spoil those of the other micro-batches.
    return Share(loss, {name: (value * share).where(share != 0, 0) for name, value in returned.metrics.items()}, share)


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
        embeddings = self._exchange(parts, embedded)
        seed_everything(randomness_seed(generation.spec.seed, step, generation.spec.batch.num_micro_batches))
        with generation.user_code:
            leaves = [embedding.requires_grad_() for embedding in embeddings if embedding.is_floating_point()]
            self._loss = generation.task.batch_loss([embedding.flatten(0, 1) for embedding in embeddings])
            self._gradients = torch.autograd.grad(self._loss.loss, leaves, allow_unused=True)

    def evaluate(self, batch: Any, micro_batch: MicroBatch) -> Returned:
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

    def _exchange(self, parts: dict[int, tuple[Tensor, ...]], like: Sequence[Tensor] | None) -> list[Tensor]:
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
