"""Forward and backward of one rank's micro-batches through a pipeline, by torch's schedules.

The schedule moves hidden states and their gradients between stages; this feeds it: inputs to the first stage, labels to
the last, everything else that the model is called with to all. Every rank of a pipeline reads the same micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from shoal_workers.engine.model.model_calls import ModelCall, ModelCalls
from shoal_workers.engine.parallel.stages import owner_of
from shoal_workers.engine.parallel.tensor import cuts_sequence
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.passes import Setting, plain, refuse_non_scalar
from shoal_workers.engine.step.randomness import seed_everything
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
"""It prints the whole schedule for every interrupted step; the exception rises all the same."""


class PipelinePasses:
    """Of one generation. `calls` must have been made of the whole model."""

    def __init__(self, setting: Setting, calls: ModelCalls, device: torch.device) -> None:
        assert setting.meshes.pp is not None
        self._setting = setting
        self._calls = calls
        self._device = device
        self._user_code = setting.user_code
        self._group = setting.meshes.pp.get_group()
        self._own = _fed(setting)
        self._shares = [0.0] * len(self._own)
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti | None = None
        self._stages: list[_Stage] = []

    def losses(self, step: int, batches: Batches, scale: float) -> list[Tensor]:
        setting = self._setting
        num = setting.spec.batch.num_micro_batches
        self._shares[:] = [micro_batch.weight / num * scale for micro_batch in self._own]
        with self._user_code, setting.splitting_loss():
            read = [setting.cut(batches.training(setting.spec, step, one.index)) for one in self._own]
            calls = [self._calls.catch(batch) for batch in read]
            schedule = self._schedule = self._schedule or self._make_schedule(calls[0])
            for stage in self._stages:
                stage.clear_runtime_states()
            seed_everything(randomness_seed(setting.spec.seed, step, self._own[0].index))
            shown: list[Tensor] = []
            weights = [micro_batch.weight / num for micro_batch in self._own]
            targets = [(batch, weight, scale, shown) for batch, weight in zip(read, weights, strict=True)]
            schedule._step_microbatches(
                [(call.first,) if setting.assembly.is_first else () for call in calls],
                [call.others for call in calls],
                targets,
                [] if setting.assembly.is_last else None,
                return_outputs=False,
            )
        return shown

    def forward_only(self, batch: Any) -> Tensor:
        setting, assembly = self._setting, self._setting.assembly
        parts = dict(zip(assembly.stages, assembly.parts, strict=True))
        with torch.no_grad(), self._user_code, setting.splitting_loss():
            cut = setting.cut(batch)
            call = self._calls.catch(cut)
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
                return torch.zeros((), device=self._device)
            return plain(self._calls.loss_of(hidden, cut)).detach().reshape(()) * setting.shown_share

    def _loss(self, output: Tensor, target: tuple[Any, float, float, list[Tensor]]) -> Tensor:
        """The last stage's; what it returns is differentiated."""
        batch, weight, scale, shown = target
        loss = self._calls.loss_of(output, batch)
        refuse_non_scalar(loss)
        if weight:
            shown.append(plain(loss).detach().reshape(()) * weight * self._setting.shown_share)
        return loss * (weight * scale / self._setting.layout.cp)

    def _make_schedule(self, call: ModelCall) -> PipelineScheduleSingle | PipelineScheduleMulti:
        layout, assembly = self._setting.layout, self._setting.assembly
        hidden = self._empty_hidden(call, device="meta").requires_grad_()
        stages = self._stages = [
            _Stage(self._setting, self._shares, module, index, assembly.num_stages, self._device,
                   call.first.to("meta") if index == 0 else hidden, hidden, self._group)
            for index, module in zip(assembly.stages, assembly.parts, strict=True)
        ]  # fmt: skip
        single, multiple = _SINGLE.get(layout.schedule), _MULTIPLE.get(layout.schedule)
        if single is not None:
            return single(stages[0], len(self._own), loss_fn=self._loss, scale_grads=False)
        assert multiple is not None
        return multiple(list(stages), len(self._own), loss_fn=self._loss, scale_grads=False)

    def _empty_hidden(self, call: ModelCall, device: str | torch.device | None = None) -> Tensor:
        """Shape and dtype of what one stage hands to the next: the input's with hidden_size for its features, or added
        to it where the input is made of indices (tokens); the sequence, dim 1, may be in parts."""
        plan, layout = self._setting.plan, self._setting.layout
        shape = [*(call.first.shape[:-1] if call.first.is_floating_point() else call.first.shape), plan.hidden_size]
        if layout.tp > 1 and cuts_sequence(plan):
            shape[1] //= layout.tp
        return torch.empty(shape, dtype=self._setting.compute_dtype, device=device or self._device)

    def _rank_of(self, stage: int) -> int:
        owner = owner_of(self._setting.layout, stage, self._setting.assembly.num_stages)
        return dist.get_global_rank(self._group, owner)


class _Stage(PipelineStage):
    """A stage that says where it is, and can be stopped between two micro-batches."""

    def __init__(
        self,
        setting: Setting,
        shares: Sequence[float],
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        example_input: Tensor,
        example_output: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        recomputes = setting.layout.recompute is not Recompute.NONE
        super().__init__(
            module, index, num_stages, device, input_args=example_input, output_args=example_output, group=group,
            dw_builder=_whole_backward if recomputes else None,
        )  # fmt: skip
        self._setting = setting
        self._shares = shares
        self.has_backward = True

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._setting.check()
        self._setting.position.enter(Phase.FORWARD)
        share_of_step(self.submod, self._shares[fwd_chunk_id])
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
        self._setting.position.enter(Phase.BACKWARD)
        return super().backward_one_chunk(*args, **kwargs)


def _whole_backward() -> Callable[[], None]:
    """What is left to do for the weights where a schedule splits the backward pass in two: nothing, the first half did
    all of it. Apart, each weight's gradient would recompute its block anew."""
    return lambda: None


def _contiguous(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """gloo sends nothing else."""
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def _fed(setting: Setting) -> tuple[MicroBatch, ...]:
    """This rank's micro-batches, with as much padding as the schedule needs."""
    own = setting.own_micro_batches()
    missing = micro_batches_fed(setting.layout, setting.spec.batch.num_micro_batches) - len(own)
    return own + (MicroBatch(own[-1].index, 0.0),) * missing
