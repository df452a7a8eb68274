"""Forward and backward of one rank's micro-batches through a pipeline, with torch's schedules.

The schedule moves hidden states and their gradients between stages. This module feeds it: the inputs go to the first
stage, the labels to the last, and everything else that the model is called with goes to all stages. Every rank of a
pipeline reads the same micro-batches. Called by `GradientPass` and `Validation`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from shoal_workers.contract.batch_partition import MicroBatch, randomness_seed
from shoal_workers.contract.layout import Recompute, Schedule
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.pipeline_feed import micro_batches_fed
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.stages import Stage, owner_of
from shoal_workers.engine.parallel.tensor_rules import cuts_sequence
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.buffers import StepBuffers
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.passes import refuse_written, share_of
from shoal_workers.engine.task.metrics import Share
from shoal_workers.engine.task.model_calls import ModelCall, ModelCalls
from shoal_workers.engine.task.randomness import seed_everything
from shoal_workers.tasks.balance import share_of_step

_SINGLE: dict[Schedule, type[ScheduleGPipe | Schedule1F1B]] = {
    Schedule.GPIPE: ScheduleGPipe,
    Schedule.ONE_F_ONE_B: Schedule1F1B,
}
_MULTIPLE: dict[Schedule, type[ScheduleInterleaved1F1B | ScheduleZBVZeroBubble | ScheduleDualPipeV]] = {
    Schedule.INTERLEAVED: ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE_V: ScheduleZBVZeroBubble,
    Schedule.DUAL_PIPE_V: ScheduleDualPipeV,
}


logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
"""torch logs the whole schedule for every interrupted step; the exception is raised in any case."""


class PipelinePasses:
    """The passes of one generation. `calls` must have been made from the whole model."""

    def __init__(self, generation: Generation, assembly: Assembly, calls: ModelCalls, buffers: StepBuffers) -> None:
        assert generation.meshes.pp is not None
        self._generation = generation
        self._buffers = buffers
        self._assembly = assembly
        self._calls = calls
        self._user_code = generation.user_code
        self._group = generation.meshes.pp.get_group()
        self._own = _fed(generation)
        self._shares = [0.0] * len(self._own)
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti | None = None
        self._stages: list[_Stage] = []
        for order in assembly.orders:
            order.begin_generation()

    def shares(self, step: int, batches: Batches, scale: float) -> list[Share]:
        generation, assembly = self._generation, self._assembly
        num = generation.spec.batch.num_micro_batches
        for order in assembly.orders:
            order.begin_step()
        self._shares[:] = [micro_batch.weight / num * scale for micro_batch in self._own]
        with self._user_code, generation.split_loss():
            read = [generation.own_tokens(batches.training(generation.spec, step, one.index)) for one in self._own]
            calls = [self._calls.catch(batch) for batch in read]
            schedule = self._schedule = self._schedule or self._make_schedule(calls[0])
            for stage in self._stages:
                stage.clear_runtime_states()
            seed_everything(randomness_seed(generation.spec.seed, step, self._own[0].index))
            shares: list[Share] = []
            weights = [micro_batch.weight / num for micro_batch in self._own]
            targets = [(batch, weight, scale, shares) for batch, weight in zip(read, weights, strict=True)]
            schedule._step_microbatches(
                [(call.first,) if assembly.is_first else () for call in calls],
                [call.others for call in calls],
                targets,
                [] if assembly.is_last else None,
                return_outputs=False,
            )
            for order in assembly.orders:
                refuse_written(order)
        return shares

    def forward_only(self, batch: Any) -> Share:
        generation, assembly = self._generation, self._assembly
        parts = dict(zip(assembly.stages, assembly.parts, strict=True))
        with torch.no_grad(), self._user_code, generation.split_loss(), self._buffers.unchanged():
            own = generation.own_tokens(batch)
            call = self._calls.catch(own)
            hidden = call.first
            for index in range(assembly.num_stages):
                part = parts.get(index)
                if part is None:
                    continue
                if index > 0 and index - 1 not in parts:
                    hidden = self._empty_hidden(call)
                    dist.recv(hidden, self._rank_of(index - 1), group=self._group)
                hidden = part(hidden, **call.others)
                if index + 1 < assembly.num_stages and index + 1 not in parts:
                    dist.send(hidden.contiguous(), self._rank_of(index + 1), group=self._group)
            if not assembly.is_last:
                return Share(torch.zeros((), device=generation.device), None)
            return share_of(generation, self._calls.loss_of(hidden, own))

    def _loss(self, output: Tensor, target: tuple[Any, float, float, list[Share]]) -> Tensor:
        """The last stage's loss; the schedule differentiates what this returns."""
        batch, weight, scale, shares = target
        returned = self._calls.loss_of(output, batch)
        if weight:
            shares.append(share_of(self._generation, returned, weight))
        return returned.loss * (weight * scale / self._generation.num_token_ranks)

    def _make_schedule(self, call: ModelCall) -> PipelineScheduleSingle | PipelineScheduleMulti:
        layout, assembly = self._generation.layout, self._assembly
        hidden = self._empty_hidden(call, device="meta").requires_grad_()
        examples = [call.first.to("meta") if index == 0 else hidden for index in assembly.stages]
        stages = self._stages = [
            _Stage(self._generation, Stage(index, module), assembly.num_stages, (example, hidden), self._feed(part))
            for part, (index, module, example) in enumerate(zip(assembly.stages, assembly.parts, examples, strict=True))
        ]
        single, multiple = _SINGLE.get(layout.schedule), _MULTIPLE.get(layout.schedule)
        if single is not None:
            return single(stages[0], len(self._own), loss_fn=self._loss, scale_grads=False)
        assert multiple is not None
        return multiple(list(stages), len(self._own), loss_fn=self._loss, scale_grads=False)

    def _feed(self, part: int) -> _Feed:
        return _Feed(self._own, self._shares, self._buffers, part)

    def _empty_hidden(self, call: ModelCall, device: str | torch.device | None = None) -> Tensor:
        """A tensor of the shape and dtype that one stage hands to the next.

        The input's shape with hidden_size in the place of its features; hidden_size is appended if the input holds
        indices (tokens). Dim 1, the sequence, may be split over the tensor axis."""
        generation = self._generation
        plan, layout = generation.plan, generation.layout
        shape = [*(call.first.shape[:-1] if call.first.is_floating_point() else call.first.shape), plan.hidden_size]
        if layout.tp > 1 and cuts_sequence(plan):
            shape[1] //= layout.tp
        return torch.empty(shape, dtype=generation.compute_dtype, device=device or generation.device)

    def _rank_of(self, stage: int) -> int:
        owner = owner_of(self._generation.layout, stage, self._assembly.num_stages)
        return dist.get_global_rank(self._group, owner)


@dataclass(frozen=True, slots=True)
class _Feed:
    """What a stage must know of the micro-batches that run through it."""

    micro_batches: Sequence[MicroBatch]
    shares: Sequence[float]
    """Of the step, by micro-batch."""
    buffers: StepBuffers
    part: int
    """The stage's index in the rank's assembly."""


class _Stage(PipelineStage):
    """A pipeline stage that reports its phase, and that can be stopped between two micro-batches."""

    def __init__(
        self,
        generation: Generation,
        stage: Stage,
        num_stages: int,
        examples: tuple[Tensor, Tensor],
        feed: _Feed,
    ) -> None:
        """`examples`: the stage's input and output, on the meta device."""
        assert generation.meshes.pp is not None
        recomputes = generation.layout.recompute is not Recompute.NONE
        super().__init__(
            stage.module,
            stage.index,
            num_stages,
            generation.device,
            input_args=examples[0],
            output_args=examples[1],
            group=generation.meshes.pp.get_group(),
            dw_builder=_whole_backward if recomputes else None,
        )
        self._generation = generation
        self._feed = feed
        self.has_backward = True

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._generation.check()
        self._generation.position.enter(Phase.FORWARD)
        feed = self._feed
        share_of_step(self.submod, feed.shares[fwd_chunk_id])
        with feed.buffers.forward(feed.micro_batches[fwd_chunk_id], feed.part):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = _contiguous(outputs), inputs
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        if bwd_chunk_id in self.bwd_cache:
            self.bwd_cache[bwd_chunk_id] = _contiguous(self.bwd_cache[bwd_chunk_id])
        return super().get_bwd_send_ops(bwd_chunk_id)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._generation.position.enter(Phase.BACKWARD)
        with self._feed.buffers.backward(self._feed.part):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._feed.buffers.backward(self._feed.part):
            return super().backward_weight_one_chunk(*args, **kwargs)


def _whole_backward() -> Callable[[], None]:
    """The second half of a backward pass that a zero-bubble schedule splits in two: nothing is left to do.

    The first half computes all gradients. In the second half each weight's gradient would recompute its block again."""
    return lambda: None


def _contiguous(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """gloo sends contiguous tensors only."""
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def _fed(generation: Generation) -> tuple[MicroBatch, ...]:
    """This rank's micro-batches, and as much padding as the schedule needs."""
    own = generation.own_micro_batches()
    missing = micro_batches_fed(generation.layout, generation.spec.batch.num_micro_batches) - len(own)
    return own + (MicroBatch(own[-1].index, 0.0),) * missing
