"""Forward and backward of a step's local micro-batches: accumulates gradients, mutates no parameter.

The loss of a micro-batch is weighted with 1 / num_micro_batches and gradients are summed over ranks, so the result is
the mean over the global batch for any world size and any deal. Ranks reduce gradients in the last micro-batch only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal_workers.contract.deal import deal, randomness_seed
from shoal_workers.contract.messages import Assignment, Phase
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.batches import Batches
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

    def run(self, step: int) -> Tensor:
        """All micro-batches of this rank in the step that follows `step` completed ones.

        Returns the sum of their weighted losses, a scalar on the device; over all ranks they add up to the mean loss.
        """
        total: Tensor | None = None
        last = len(self._own) - 1
        for count, micro_batch in enumerate(self._own):
            self._check()
            if last:
                self._fsdp.set_requires_gradient_sync(count == last)
                self._fsdp.set_is_last_backward(count == last)
            self._position.enter(Phase.FORWARD)
            with self._user_code:
                seed_everything(randomness_seed(self._spec.seed, step, micro_batch.index))
                batch = self._batches.training(self._spec, step, micro_batch.index)
                loss = self._task.loss(self._model, batch)
                _refuse_non_scalar(loss)
            weighted = loss * (micro_batch.weight / self._num_micro_batches)
            self._position.enter(Phase.BACKWARD)
            with self._user_code:
                torch.autograd.backward(weighted)
            if micro_batch.weight:
                total = weighted.detach() if total is None else total + weighted.detach()
        assert self._own, "a world larger than the number of micro-batches is refused by the spec"
        return torch.zeros((), device=weighted.device) if total is None else total


def _refuse_non_scalar(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss() must return a scalar tensor, the mean over the micro-batch; it returned {shown}.")
