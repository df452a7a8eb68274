"""Forward and backward of one rank's micro-batches through a pipeline, with torch's schedules.

The schedule moves hidden states and their gradients between stages; the state of the random generators goes along with
each hidden state. Every rank of a pipeline reads the same micro-batches, and calls the task's loss up to its call of
the model, so that each stage has the model's arguments; the last stage computes the loss. Called by `GradientPass` and
`Validation`. Apart from passes.py, which is all that a layout without pp needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from shoal_workers.contract.layout import Recompute, Schedule, micro_batches_fed
from shoal_workers.contract.messages import Phase
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.stages import Handover, Stage, owner_of
from shoal_workers.engine.parallel.tensor import cuts_sequence
from shoal_workers.engine.randomness import generator_states, seed_everything, set_generator_states
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.buffers import StepBuffers
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.passes import compute_share, refuse_written
from shoal_workers.engine.task.model_calls import ModelCall, ModelCalls
from shoal_workers.engine.task.returned import Returned, Share
from shoal_workers.tasks.feed_forward import set_share_of_step
from shoal_workers.torch_internals import run_schedule

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
        self._fed: list[_Fed] = []
        self._shares: list[Share] = []
        """The shares of the step that runs, so far."""
        self._handed: dict[tuple[int, int], Tensor] = {}
        """(stage, micro-batch) -> the state of the random generators that the stage before has left, on the device."""
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti | None = None
        self._stages: list[_Stage] = []
        for axis in assembly.data_axes:
            axis.begin_generation()
        for forward_pass in assembly.forward_passes:
            forward_pass.begin_generation()

    has_deviated = False

    def keep_whole(self) -> None:
        raise AssertionError("no rank of a pipeline has said that it deviated")

    def run_micro_batches(self, step: int, batches: Batches, scale: float, *, is_voted: bool = False) -> list[Share]:
        generation, assembly = self._generation, self._assembly
        num = generation.spec.batch.num_micro_batches
        for axis in assembly.data_axes:
            axis.begin_step()
        weights = [micro_batch.weight / num for micro_batch in self._own]
        with self._user_code:
            self._fed[:] = [
                _Fed(*self._called(step, micro_batch, batches), weight=weight, scale=scale)
                for micro_batch, weight in zip(self._own, weights, strict=True)
            ]
            schedule = self._schedule = self._schedule or self._make_schedule(self._fed[0].call)
            for stage in self._stages:
                stage.clear_runtime_states()
            self._handed.clear()
            self._shares.clear()
            try:
                run_schedule(
                    schedule,
                    [(fed.call.first,) if assembly.is_first else () for fed in self._fed],
                    [{} for _ in self._fed],
                    [None for _ in self._fed],
                    [] if assembly.is_last else None,
                )
            except RuntimeError:
                for stage in self._stages:
                    if stage.error is not None:  # without torch's list of its arguments
                        raise stage.error from None
                raise
            for axis in assembly.data_axes:
                refuse_written(axis.written_parameter())
        return list(self._shares)

    def run_forward(self, batch: Any) -> Share:
        generation, assembly = self._generation, self._assembly
        parts = dict(zip(assembly.stages, zip(assembly.parts, assembly.forward_passes, strict=True), strict=True))
        with torch.no_grad(), self._user_code, self._buffers.unchanged():
            is_training = assembly.parts[0].training
            call = self._caught(batch, is_training=is_training)
            expected = self._empty_hidden(call, device="meta")
            received: Handover | None = None
            for index in range(assembly.num_stages):
                if index not in parts:
                    continue
                part, forward_pass = parts[index]
                if index > 0 and index - 1 not in parts:
                    received = Handover(self._empty_hidden(call), torch.empty_like(call.at_call))
                    received = self._received(received, self._rank_of(index - 1))
                forward_pass.expect(expected, received)
                set_generator_states(call.at_call)
                output = part(*call.args, **call.kwargs)
                if index + 1 < assembly.num_stages:
                    received = forward_pass.handed_over()
                    if index + 1 not in parts:
                        self._send(received, self._rank_of(index + 1))
            if not assembly.is_last:
                return Share(torch.zeros((), device=generation.device), None)
            return compute_share(generation, self._returned(output, batch, call, is_training=is_training))

    def _called(self, step: int, micro_batch: MicroBatch, batches: Batches) -> tuple[Any, ModelCall]:
        """A micro-batch, and how the task calls the model for it."""
        generation = self._generation
        seed_everything(randomness_seed(generation.spec.seed, step, micro_batch.index))
        batch = batches.training(generation.spec, step, micro_batch.index)
        return batch, self._caught(batch)

    def _caught(self, batch: Any, *, is_training: bool = True) -> ModelCall:
        """The call of the model, with this rank's tokens."""
        call, context = self._calls.catch(batch, is_training=is_training), self._assembly.context
        if context is None:
            return call
        args, kwargs = context.arguments(call.args, call.kwargs)
        return replace(call, args=args, kwargs=kwargs, first=context.cut(call.first))

    def _returned(self, output: Any, batch: Any, call: ModelCall, *, is_training: bool = True) -> Returned:
        """Returns what the task's loss makes of the last stage's output."""
        context = self._assembly.context
        whole = output if context is None else context.output(output)
        return self._calls.loss_of(whole, batch, call, generator_states(), is_training=is_training)

    def _loss(self, output: Any, fed: _Fed) -> Tensor:
        """The last stage's loss; the schedule differentiates what this returns."""
        returned = self._returned(output, fed.batch, fed.call)
        if fed.weight:
            self._shares.append(compute_share(self._generation, returned, fed.weight))
        return returned.loss * (fed.weight * fed.scale)

    def _make_schedule(self, call: ModelCall) -> PipelineScheduleSingle | PipelineScheduleMulti:
        layout, assembly = self._generation.layout, self._assembly
        hidden = self._empty_hidden(call, device="meta").requires_grad_()
        examples = [call.first.to("meta") if index == 0 else hidden for index in assembly.stages]
        own = zip(assembly.stages, assembly.parts, assembly.forward_passes, examples, strict=True)
        stages = self._stages = [
            _Stage(self, self._generation, Stage(index, module, forward_pass), part, (example, hidden))
            for part, (index, module, forward_pass, example) in enumerate(own)
        ]
        # `scale_grads` would divide the gradients by the number of micro-batches, but the losses have their weights
        # already.
        single, multiple = _SINGLE.get(layout.schedule), _MULTIPLE.get(layout.schedule)
        if single is not None:
            return single(stages[0], len(self._own), loss_fn=_is_loss, scale_grads=False)
        assert multiple is not None
        return multiple(list(stages), len(self._own), loss_fn=_is_loss, scale_grads=False)

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

    def _send(self, handover: Handover, rank: int) -> None:
        dist.send(handover.hidden.contiguous(), rank, group=self._group)
        dist.send(handover.generators.to(self._generation.device), rank, group=self._group)

    def _received(self, into: Handover, rank: int) -> Handover:
        generators = into.generators.to(self._generation.device)
        dist.recv(into.hidden, rank, group=self._group)
        dist.recv(generators, rank, group=self._group)
        return Handover(into.hidden, generators.cpu())


@dataclass(frozen=True, slots=True)
class _Fed:
    """One micro-batch of the step that runs."""

    batch: Any
    call: ModelCall
    weight: float
    """Its share of the mean over all micro-batches; 0: padding."""
    scale: float


def _is_loss(output: Tensor, _: None) -> Tensor:
    """Returns the last stage's output, which is the loss already."""
    return output


class _Stage(PipelineStage):
    """A pipeline stage that reports its phase, and that can be stopped between two micro-batches.

    The output of the last one is the loss."""

    def __init__(
        self,
        passes: PipelinePasses,
        generation: Generation,
        stage: Stage,
        part: int,
        examples: tuple[Tensor, Tensor],
    ) -> None:
        """`part`: the stage's index in the rank's assembly; `examples`: its input and output, on the meta device."""
        assert generation.meshes.pp is not None and stage.forward_pass is not None
        recomputes = generation.layout.recompute is not Recompute.NONE
        super().__init__(
            stage.module,
            stage.index,
            passes._assembly.num_stages,
            generation.device,
            input_args=examples[0],
            output_args=examples[1],
            group=generation.meshes.pp.get_group(),
            dw_builder=_whole_backward if recomputes else None,
        )
        self._generation = generation
        self._passes = passes
        self._part = part
        self._forward_pass = stage.forward_pass
        self._handed = examples[1]
        self._micro_batch = 0
        self.error: Exception | None = None
        """What the last forward pass has raised."""
        self.has_backward = True

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._generation.check()
        self._generation.position.enter(Phase.FORWARD)
        self._micro_batch = fwd_chunk_id
        fed = self._passes._fed[fwd_chunk_id]
        set_share_of_step(self.submod, fed.weight * fed.scale)
        with self._passes._buffers.forward(self._passes._own[fwd_chunk_id], self._part):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **_: Any) -> Any:
        self.error = None
        try:
            return self._forward(None if self.is_first else args[0])
        except Exception as error:
            self.error = error
            raise

    def _forward(self, hidden: Tensor | None) -> Tensor:
        passes, number = self._passes, self._micro_batch
        fed = passes._fed[number]
        received = None
        if hidden is not None:
            # Generators are set on the host; their states are on the device only to be sent.
            received = Handover(hidden, passes._handed.pop((self.stage_index, number)).cpu())
        self._forward_pass.expect(self._handed, received)
        set_generator_states(fed.call.at_call)
        output = self.submod(*fed.call.args, **fed.call.kwargs)
        if self.is_last:
            return passes._loss(output, fed)
        handed = self._forward_pass.handed_over()
        passes._handed[self.stage_index + 1, number] = handed.generators.to(self._generation.device)
        result: Tensor = output.contiguous()  # gloo sends no other
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        if not self.is_first:
            # After the hidden state, as in `get_fwd_send_ops`: receives match sends by their order.
            states = torch.empty_like(self._passes._fed[fwd_chunk_id].call.at_call, device=self._generation.device)
            self._passes._handed[self.stage_index, fwd_chunk_id] = states
            ops.append(dist.P2POp(dist.irecv, states, self._passes._rank_of(self.stage_index - 1), self.group))
        return ops

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.is_last:
            states = self._passes._handed.pop((self.stage_index + 1, fwd_chunk_id))
            ops.append(dist.P2POp(dist.isend, states, self._passes._rank_of(self.stage_index + 1), self.group))
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        if bwd_chunk_id in self.bwd_cache:
            self.bwd_cache[bwd_chunk_id] = _contiguous(self.bwd_cache[bwd_chunk_id])
        return super().get_bwd_send_ops(bwd_chunk_id)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._generation.position.enter(Phase.BACKWARD)
        with self._passes._buffers.backward(self._part):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._passes._buffers.backward(self._part):
            return super().backward_weight_one_chunk(*args, **kwargs)


def _whole_backward() -> Callable[[], None]:
    """The second half of a backward pass that a zero-bubble schedule splits in two: nothing is left to do.

    The first half computes all gradients. In the second half each weight's gradient would recompute its block again."""
    return lambda: None


def _contiguous(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Returns contiguous tensors, because gloo sends no others."""
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def _fed(generation: Generation) -> tuple[MicroBatch, ...]:
    """Returns this rank's micro-batches, and as much padding as the schedule needs."""
    own = generation.own_micro_batches()
    missing = micro_batches_fed(generation.layout, generation.spec.batch.num_micro_batches) - len(own)
    return own + (MicroBatch(own[-1].index, 0.0),) * missing
