"""Forward and backward of one rank's micro-batches without a pipeline: one after the other.

    share of a rank     the mean over its tokens, over num_micro_batches, over the cp ranks that have other tokens,
                        and over the tp ranks that compute the same: all ranks' shares add up to the mean loss

The gradients of all ranks are summed, so what is differentiated is the mean over the global batch, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from shoal_workers.contract.batch_partition import MicroBatch, micro_batches_of_rank, randomness_seed
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.deterministic.exact_gradients import ExactGradients
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.model.assembly import Assembly
from shoal_workers.engine.model.task import LoadedTask
from shoal_workers.engine.model.user_code import UserCode
from shoal_workers.engine.parallel.compression import compute_dtype
from shoal_workers.engine.parallel.context import shard_batch
from shoal_workers.engine.parallel.sharding import keeps_gathered, reduces_once
from shoal_workers.engine.parallel.tensor import splits_vocabulary
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.randomness import seed_everything
from shoal_workers.tasks.balance import share_of_step


@dataclass(frozen=True, slots=True)
class Setting:
    """What the passes of one generation work with."""

    spec: JobSpec
    plan: ParallelPlan
    task: LoadedTask
    assembly: Assembly
    meshes: Meshes
    position: Position
    check: Callable[[], None]
    """Raises Fenced once the generation is over."""

    @property
    def user_code(self) -> UserCode:
        """Around calls into the task."""
        return UserCode(lambda: self.position.phase)

    @property
    def layout(self) -> Layout:
        return self.meshes.layout

    @property
    def shown_share(self) -> float:
        """Of a loss that every tp rank has, and each cp rank for its own tokens."""
        return 1.0 / (self.layout.tp * self.layout.cp)

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.spec.precision)

    def own_micro_batches(self) -> tuple[MicroBatch, ...]:
        rank = self.layout.data_rank(self.meshes.rank)
        return micro_batches_of_rank(self.spec.batch.num_micro_batches, rank, self.layout.num_data_ranks)

    def cut(self, batch: Any) -> Any:
        """This rank's tokens of a batch."""
        cp = self.meshes.cp
        return batch if cp is None else shard_batch(batch, self.plan, cp.get_local_rank(), cp.size())

    def splitting_loss(self) -> AbstractContextManager[None]:
        """Around forward and backward passes whose logits are split over the vocabulary."""
        return loss_parallel() if self.layout.tp > 1 and splits_vocabulary(self.plan) else nullcontext()


class Passes(Protocol):
    """All micro-batches of a rank in a step, and single forward passes."""

    def losses(self, step: int, batches: Batches, scale: float) -> list[Tensor]:
        """This rank's shares of the losses of its real micro-batches; their gradients, times `scale`, have been left
        where they are collected. Empty where another pipeline rank has the losses."""
        ...

    def forward_only(self, batch: Any) -> Tensor:
        """Scalar: this rank's share of the mean loss of a whole `batch`, without a gradient. All ranks that share a
        batch together; the caller seeds."""
        ...


class LocalPasses:
    """Passes of ranks that have all blocks."""

    def __init__(self, setting: Setting, exact: ExactGradients | None) -> None:
        self._setting = setting
        self._exact = exact
        self._user_code = setting.user_code
        self._own = setting.own_micro_batches()
        (self._model,) = setting.assembly.parts
        assert isinstance(self._model, FSDPModule)
        self._fsdp: FSDPModule = self._model
        self._reduces_once = reduces_once(setting.layout)
        self._keeps_gathered = keeps_gathered(setting.layout)
        if exact is not None:
            self._fsdp.set_requires_gradient_sync(False)

    def losses(self, step: int, batches: Batches, scale: float) -> list[Tensor]:
        setting = self._setting
        losses: list[Tensor] = []
        for count, micro_batch in enumerate(self._own):
            setting.check()
            self._prepare_backward(is_last=count == len(self._own) - 1)
            is_padding = not micro_batch.weight
            with self._exact.collecting(is_padding=is_padding) if self._exact else nullcontext():
                loss = self._forward_backward(step, micro_batch, batches, scale)
            if not is_padding:
                losses.append(loss)
        return losses

    def forward_only(self, batch: Any) -> Tensor:
        with torch.no_grad(), self._setting.splitting_loss(), self._user_code:
            loss = self._setting.task.loss(self._model, self._setting.cut(batch))
            return plain(loss).detach().reshape(()) * self._setting.shown_share

    def _prepare_backward(self, *, is_last: bool) -> None:
        """What FSDP does after the next backward pass: always the whole of it after the last one."""
        if len(self._own) == 1:
            return
        fsdp = self._fsdp
        fsdp.set_is_last_backward(is_last)
        if self._exact is None:
            fsdp.set_requires_gradient_sync(is_last or not self._reduces_once)
        if self._keeps_gathered:
            fsdp.set_reshard_after_backward(is_last)
        if self._setting.layout.dp_replicate > 1:
            fsdp.set_requires_all_reduce(is_last)

    def _forward_backward(self, step: int, micro_batch: MicroBatch, batches: Batches, scale: float) -> Tensor:
        setting = self._setting
        setting.position.enter(Phase.FORWARD)
        weight = micro_batch.weight / setting.spec.batch.num_micro_batches
        share_of_step(self._model, weight * scale)
        with self._user_code, setting.splitting_loss():
            seed_everything(randomness_seed(setting.spec.seed, step, micro_batch.index))
            batch = setting.cut(batches.training(setting.spec, step, micro_batch.index))
            loss = setting.task.loss(self._model, batch)
            refuse_non_scalar(loss)
            weighted = loss * weight
            setting.position.enter(Phase.BACKWARD)
            torch.autograd.backward(weighted * (scale / setting.layout.cp))
        return plain(weighted).detach().reshape(()) * setting.shown_share


def plain(loss: Tensor) -> Tensor:
    """A loss that is the same on every rank of its mesh, as an ordinary tensor."""
    return loss.to_local() if isinstance(loss, DTensor) else loss


def refuse_non_scalar(loss: Tensor) -> None:
    """TypeError for what no task may return."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss() must return a scalar tensor, the mean over the micro-batch; it returned {shown}.")
