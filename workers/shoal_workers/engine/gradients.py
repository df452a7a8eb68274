"""Forward and backward of a step's local micro-batches: accumulates gradients, mutates no parameter.

The loss of a micro-batch is weighted with 1 / num_micro_batches and gradients are summed over ranks, so the result is
the mean over the global batch for any world size and any deal. Ranks reduce gradients in the last micro-batch only.
In deterministic mode FSDP reduces none of them; `exact` does, after the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal_workers.contract.deal import MicroBatch, deal, randomness_seed
from shoal_workers.contract.messages import Assignment, Phase
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.batches import Batches
from shoal_workers.engine.clip import squared_norm
from shoal_workers.engine.exact import ExactGradients, ExactSums
from shoal_workers.engine.position import Position
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.engine.task import LoadedTask
from shoal_workers.engine.user_code import UserCode


class GradientPass:
    """The forward and backward passes of one rank in one generation."""

    def __init__(
        self,
        spec: JobSpec,
        assignment: Assignment,
        task: LoadedTask,
        model: nn.Module,
        batches: Batches,
        position: Position,
        check: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._task = task
        assert isinstance(model, FSDPModule)
        self._model = model
        self._fsdp: FSDPModule = model
        self._batches = batches
        self._position = position
        self._check = check
        self._user_code = UserCode(lambda: position.phase)
        self._num_micro_batches = spec.batch.num_micro_batches
        self._own = deal(self._num_micro_batches, assignment.rank, assignment.world_size)
        assert self._own, "a world larger than the number of micro-batches is refused by the spec"
        self._is_first_rank = assignment.rank == 0
        self._device = next(model.parameters()).device
        self._exact: ExactGradients | None = None
        if spec.deterministic:
            self._exact = ExactGradients(model, self._num_micro_batches)
            self._fsdp.set_requires_gradient_sync(False)
        self._exact_sums: ExactSums | None = None

    def run(self, step: int) -> Tensor:
        """All micro-batches of this rank in the step that follows `step` completed ones.

        Returns the sum of their weighted losses, a scalar on the device; over all ranks they add up to the mean loss.
        """
        if self._exact is None:
            losses = self._losses(step)
            return functools.reduce(torch.add, losses) if losses else self._zero()
        self._exact_sums = None
        while self._exact_sums is None:
            self._exact.begin()
            self._exact_sums = self._exact.reduce(self._losses(step))
        return self._said_once(self._exact_sums.loss)

    def squared_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Scalar float64: this rank's part of the squared L2 norm of `gradients`, which the last `run` has left."""
        if self._exact_sums is None:
            return squared_norm(gradients, self._device)
        return self._said_once(self._exact_sums.squared_norm)

    def _losses(self, step: int) -> list[Tensor]:
        """The weighted losses of the real micro-batches; their gradients have been left where they are collected."""
        losses: list[Tensor] = []
        last = len(self._own) - 1
        for count, micro_batch in enumerate(self._own):
            self._check()
            if last:
                self._fsdp.set_is_last_backward(count == last)
                if self._exact is None:
                    self._fsdp.set_requires_gradient_sync(count == last)
            is_filler = not micro_batch.weight
            with self._exact.collecting(is_filler=is_filler) if self._exact else nullcontext():
                weighted = self._forward_backward(step, micro_batch)
            if not is_filler:
                losses.append(weighted)
        return losses

    def forward_only(self, step: int, index: int) -> Tensor:
        """The loss of any micro-batch of a step, as training computes it, without a gradient. All ranks together."""
        self._check()
        with torch.no_grad():
            return self._forward(step, index).detach().reshape(())

    def _forward_backward(self, step: int, micro_batch: MicroBatch) -> Tensor:
        weighted = self._forward(step, micro_batch.index) * (micro_batch.weight / self._num_micro_batches)
        self._position.enter(Phase.BACKWARD)
        with self._user_code:
            torch.autograd.backward(weighted)
        return weighted.detach().reshape(())

    def _forward(self, step: int, index: int) -> Tensor:
        self._position.enter(Phase.FORWARD)
        with self._user_code:
            seed_everything(randomness_seed(self._spec.seed, step, index))
            batch = self._batches.training(self._spec, step, index)
            loss = self._task.loss(self._model, batch)
            _refuse_non_scalar(loss)
        return loss

    def _said_once(self, total: float) -> Tensor:
        """A total that every rank knows, as ballots that add up to it: one plus zeros is exact in any order."""
        return self._zero() + total if self._is_first_rank else self._zero()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)


def _refuse_non_scalar(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss() must return a scalar tensor, the mean over the micro-batch; it returned {shown}.")
