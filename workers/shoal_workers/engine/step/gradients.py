"""The gradient of a step: accumulated over the local micro-batches; no parameter is changed.

    passes              forward and backward of this rank's micro-batches, one after the other or through a pipeline
    partial gradients   are summed over the ranks that each have a part of the sum
    buffers             what forward passes change in them is added up (buffers.py)
    afterwards          `grad` of every parameter is this rank's shard of the gradient of the mean loss, times the loss
                        scale

In deterministic mode FSDP reduces nothing; `ExactGradients` does so after the last micro-batch. Called by the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.messages import Phase
from shoal_workers.engine.deterministic.exact_gradients import ExactGradients, ExactSums
from shoal_workers.engine.deterministic.integer_sum import sums_over_ranks
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.buffers import StepBuffers
from shoal_workers.engine.step.clip import Gradients
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.partial_gradients import PartialGradients
from shoal_workers.engine.step.passes import LocalPasses, Passes
from shoal_workers.engine.step.pipeline_passes import PipelinePasses
from shoal_workers.engine.step.used_parameters import UseCounts
from shoal_workers.engine.task.model_calls import ModelCalls
from shoal_workers.engine.task.randomness import seed_everything
from shoal_workers.engine.task.returned import Share
from shoal_workers.tasks.feed_forward import forget_load, move_biases, sum_load

_SHOWN = 8
"""Names of parameters in a remark."""


class GradientPass:
    """Computes the gradients of one generation on one rank. Training thread only.

    Args:
        calls: how the task calls the whole model; needed for a pipeline.
        trained: names of the whole model's parameters that need a gradient; only `drop_unused` needs them.
    """

    def __init__(
        self,
        generation: Generation,
        assembly: Assembly,
        batches: Batches,
        calls: ModelCalls,
        trained: Sequence[str] = (),
    ) -> None:
        self._generation = generation
        self._assembly = assembly
        self._batches = batches
        self._exact: ExactGradients | None = None
        if generation.spec.deterministic:
            (model,) = assembly.parts
            self._exact = ExactGradients(model, generation.spec.batch.num_micro_batches)
        self._exact_sums: ExactSums | None = None
        self._buffers = buffers = StepBuffers(generation, assembly)
        self.passes: Passes = (
            LocalPasses(generation, assembly, self._exact, buffers)
            if generation.layout.pp == 1
            else PipelinePasses(generation, assembly, calls, buffers)
        )
        self._partial_gradients = PartialGradients(assembly, generation.meshes)
        self._copies = assembly.copies()
        self._uses = UseCounts(trained, generation.layout.world_size)
        self._metrics = generation.task.metrics(generation.device, writes_log=generation.rank == 0)
        self._metric_sums = torch.zeros(0, dtype=torch.float64, device=generation.device)

    def run(self, step: int, scale: float = 1.0) -> Tensor:
        """Run all micro-batches of this rank in the step that follows `step` completed ones.

        Returns this rank's share of the mean loss, a scalar on the device; the shares of all ranks add up to it.
        """
        for part in self._assembly.parts:
            forget_load(part)
        self._buffers.begin()
        if self._exact is None:
            shares = self.passes.shares(step, self._batches, scale)
            self._partial_gradients.add_up()
            self._sum_load()
            self._buffers.add_up()
            self._agree(shares)
            self._metric_sums = self._metrics.sums(shares)
            return torch.stack([share.loss for share in shares]).sum() if shares else self._zero()
        self._exact_sums = None
        shares = []
        while self._exact_sums is None:
            self._exact.begin()
            self._buffers.begin()
            shares = self.passes.shares(step, self._batches, scale)
            self._exact_sums = self._exact.reduce([share.loss for share in shares])
        self._sum_load()
        self._buffers.add_up()
        self._agree(shares)
        if self._metrics.names:
            totals = sums_over_ranks(self._metrics.columns(shares))
            self._metric_sums = torch.stack([self._from_rank_0(total) for total in totals])
        return self._from_rank_0(self._exact_sums.loss)

    def metric_sums(self) -> Tensor:
        """Float64 of shape (number of the task's metrics,): this rank's share of the means of the last `run`."""
        return self._metric_sums

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """`metric_sums` of all ranks, added up: by name, without those that are not finite."""
        return self._metrics.by_name(sums)

    def uses(self) -> Tensor:
        """This rank's part of the counts of `drop_unused`."""
        used = {key for order in self._assembly.orders for key in order.used_parameters()}
        is_exact = self._exact is not None  # then FSDP sums nothing, and no rank has zeros for what it has not used
        return self._uses.encoded(
            {
                name
                for name, parameter in self._assembly.all_parameters()
                if parameter.grad is not None and (is_exact or id(parameter) in used)
            }
        )

    def drop_unused(self, uses: Sequence[float], step: int) -> None:
        """After the vote, before the update: a parameter that no rank has used in the step has no gradient. `uses`: the
        sum of all ranks' `uses`."""
        unused = self._uses.unused(uses)
        if not unused:
            return
        for name, parameter in self._assembly.all_parameters():
            if name in unused:
                parameter.grad = None
        if step == 0:
            self._remark(unused)

    def gradients(self) -> Gradients:
        """The gradients of the last `run`."""
        return Gradients.of(
            (parameter, 0.0 if id(parameter) in self._copies else self._assembly.share(parameter))
            for parameter in self._assembly.parameters()
        )

    def squared_norm(self, gradients: Gradients) -> Tensor:
        """Scalar float64: this rank's share of the squared L2 norm of the whole gradient."""
        if self._exact_sums is None:
            return gradients.squared_norm(self._generation.device)
        return self._from_rank_0(self._exact_sums.squared_norm)

    def forward_only(self, step: int, index: int) -> Tensor:
        """This rank's share of the loss of any micro-batch of a step, as training computes it, without a gradient.

        Called by all ranks together; after the last call, `reshard`."""
        generation = self._generation
        generation.check()
        generation.position.enter(Phase.FORWARD)
        seed_everything(randomness_seed(generation.spec.seed, step, index))
        with generation.user_code:
            batch = self._batches.training(generation.spec, step, index)
        return self.passes.forward_only(batch).loss

    def reshard(self) -> None:
        """See `Assembly.reshard`."""
        self._assembly.reshard()

    def balance(self) -> None:
        """Called right before the optimizer's step: what a step changes in the model beside its parameters."""
        for part in self._assembly.parts:
            move_biases(part)
        self._buffers.apply()

    @property
    def meets_new_buffers(self) -> bool:
        """For the ballot: in the last `run` a buffer has changed on this rank that the ranks do not exchange yet. Then
        all call `agree_on_buffers`, and run the step again."""
        return self._buffers.has_met_others

    def agree_on_buffers(self) -> None:
        """A collective. Afterwards no parameter has a gradient."""
        self._buffers.agree()
        self._generation.check()
        for parameter in self._assembly.parameters():
            parameter.grad = None

    def _agree(self, shares: Sequence[Share]) -> None:
        with self._generation.user_code:
            self._metrics.agree(shares)
        self._generation.check()

    def _remark(self, unused: Sequence[str]) -> None:
        """After the first step: name the parameters without a gradient in the log, from one rank. Such a parameter is a
        mistake more often than not. An expert may have got no token."""
        generation = self._generation
        if generation.rank != 0 or generation.plan.experts:
            return
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        generation.outbox.log_text(
            f"{len(unused)} parameters got no gradient in the first step and are not trained until they get one: "
            f"{', '.join(unused[:_SHOWN])}{more}. Use them in forward(), leave them out of the model, or set "
            "requires_grad_(False) if this is meant."
        )

    def _sum_load(self) -> None:
        """Sum the experts' loads over the ranks that have the same blocks and other samples or tokens."""
        dense = self._generation.meshes.dense

        def over_data_ranks(load: Tensor) -> Any:
            for axis in range(dense.ndim):
                if dense.size(axis) > 1:
                    dist.all_reduce(load, group=dense.get_group(axis))

        for part in self._assembly.parts:
            sum_load(part, over_data_ranks)

    def _from_rank_0(self, total: float) -> Tensor:
        """Rank 0 contributes the total and the others zero, so the sum over ranks is exact in any order."""
        return self._zero() + total if self._generation.rank == 0 else self._zero()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._generation.device)
