"""The gradient of a step: accumulates over the local micro-batches, mutates no parameter.

    passes      forward and backward of this rank's micro-batches, one after the other or through a pipeline
    terms       what several ranks have a term of is summed
    afterwards  `grad` of every parameter is this rank's shard of the gradient of the mean loss, times the loss scale

In deterministic mode FSDP reduces nothing; `exact` does, after the last micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.messages import Phase
from shoal_workers.engine.deterministic.exact_gradients import ExactGradients, ExactSums
from shoal_workers.engine.model.model_calls import ModelCalls
from shoal_workers.engine.parallel.partial_gradients import PartialGradients
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.clip import Gradients
from shoal_workers.engine.step.passes import LocalPasses, Passes, Setting
from shoal_workers.engine.step.pipeline_passes import PipelinePasses
from shoal_workers.engine.step.randomness import seed_everything
from shoal_workers.tasks.balance import forget_load, move_biases, sum_load


class GradientPass:
    """One generation's, on one rank. Training thread only.

    Args:
        calls: of the whole model; needed for a pipeline.
    """

    def __init__(self, setting: Setting, batches: Batches, calls: ModelCalls, device: torch.device) -> None:
        self._setting = setting
        self._batches = batches
        self._device = device
        self._is_first_rank = setting.meshes.rank == 0
        self._exact: ExactGradients | None = None
        if setting.spec.deterministic:
            (model,) = setting.assembly.parts
            self._exact = ExactGradients(model, setting.spec.batch.num_micro_batches)
        self._exact_sums: ExactSums | None = None
        self.passes: Passes = (
            LocalPasses(setting, self._exact) if setting.layout.pp == 1 else PipelinePasses(setting, calls, device)
        )
        self._terms = PartialGradients(setting.assembly, setting.meshes)
        self._copies = setting.assembly.copies()

    def run(self, step: int, scale: float = 1.0) -> Tensor:
        """All micro-batches of this rank in the step that follows `step` completed ones.

        Returns this rank's share of the mean loss, a scalar on the device: over all ranks they add up to it.
        """
        for part in self._setting.assembly.parts:
            forget_load(part)
        if self._exact is None:
            losses = self.passes.losses(step, self._batches, scale)
            self._terms.add_up()
            self._sum_load()
            return torch.stack(losses).sum() if losses else self._zero()
        self._exact_sums = None
        while self._exact_sums is None:
            self._exact.begin()
            self._exact_sums = self._exact.reduce(self.passes.losses(step, self._batches, scale))
        self._sum_load()
        return self._said_once(self._exact_sums.loss)

    def gradients(self) -> Gradients:
        """What the last `run` has left."""
        assembly = self._setting.assembly
        return Gradients.of(
            (parameter, 0.0 if id(parameter) in self._copies else assembly.share(parameter))
            for parameter in assembly.parameters()
        )

    def squared_norm(self, gradients: Gradients) -> Tensor:
        """Scalar float64: this rank's share of the squared L2 norm of the whole gradient."""
        if self._exact_sums is None:
            return gradients.squared_norm(self._device)
        return self._said_once(self._exact_sums.squared_norm)

    def forward_only(self, step: int, index: int) -> Tensor:
        """This rank's share of the loss of any micro-batch of a step, as training computes it, without a gradient. All
        ranks together."""
        setting = self._setting
        setting.check()
        setting.position.enter(Phase.FORWARD)
        seed_everything(randomness_seed(setting.spec.seed, step, index))
        with setting.user_code:
            batch = self._batches.training(setting.spec, step, index)
        return self.passes.forward_only(batch)

    def after_update(self) -> None:
        """The optimizer has stepped."""
        for part in self._setting.assembly.parts:
            move_biases(part)

    def _sum_load(self) -> None:
        """Over the ranks that have the same blocks and other samples or tokens."""
        dense = self._setting.meshes.dense

        def over_data_ranks(load: Tensor) -> Any:
            for axis in range(dense.ndim):
                if dense.size(axis) > 1:
                    dist.all_reduce(load, group=dense.get_group(axis))

        for part in self._setting.assembly.parts:
            sum_load(part, over_data_ranks)

    def _said_once(self, total: float) -> Tensor:
        """A total that every rank knows, as ballots that add up to it: one plus zeros is exact in any order."""
        return self._zero() + total if self._is_first_rank else self._zero()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)
