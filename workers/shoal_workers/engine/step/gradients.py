"""The gradient of a step: accumulated over the local micro-batches; no parameter is changed. Hides which ranks have a
part of a sum, and what a parameter has that no rank has used.

    passes              forward and backward of this rank's micro-batches, one after the other or through a pipeline
    partial gradients   are summed over the ranks that each have a part of the sum, once per step, on this rank's
                        shards, after FSDP has reduced them: sums over different axes commute
                          tensor axis   norms on parts of a sequence, routers of split experts: all-reduce over tp
                          stages        a parameter that several stages of a pipeline have: its ranks exchange summands
    buffers             what forward passes change in them is added up after the vote (buffers.py)
    afterwards          `grad` of every parameter is this rank's shard of the gradient of the mean loss, times the loss
                        scale and, if losses are sums with weights, times `weight`
    clipping            by the global L2 norm (Pascanu et al. 2013). Squared norms are summed in the vote, so it needs
                        no collective of its own; the result equals `torch.nn.utils.clip_grad_norm_` on the whole model

A parameter that this rank's micro-batches have not used has zeros as its gradient after the sum over ranks, because all
ranks take part in that sum. The ballots count the ranks that have used it; if there is none, its gradient is dropped
before the update: no state, no weight decay, as in a loop of plain torch. With alternating updates the gradients of all
other optimizers are dropped on every rank, before the norm.

In deterministic mode FSDP reduces nothing; `ExactGradients` does so after the last micro-batch. Called by the trainer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.messages import Phase
from shoal_workers.engine.deterministic.exact_gradients import ExactGradients, ExactSums
from shoal_workers.engine.deterministic.integer_sum import sums_over_ranks
from shoal_workers.engine.group.gradient_buckets import sum_squares
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.parallel.assembly import Assembly, SharedParameter
from shoal_workers.engine.parallel.cutting import local
from shoal_workers.engine.parallel.device_copies import to_device
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.buffers import StepBuffers
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.passes import LocalPasses
from shoal_workers.engine.step.pipeline_passes import PipelinePasses
from shoal_workers.engine.task.model_calls import ModelCalls
from shoal_workers.engine.task.returned import Metrics, Share
from shoal_workers.tasks.feed_forward import forget_load, has_balance_loss, move_biases, sum_load

_SHOWN = 8
"""Names of parameters in a remark."""


Passes = LocalPasses | PipelinePasses
"""All micro-batches of a rank in a step, and single forward passes; see `LocalPasses` for the methods."""


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
        self.batches = batches
        self._exact: ExactGradients | None = None
        if generation.spec.deterministic:
            (model,) = assembly.parts
            self._exact = ExactGradients(model, generation.spec.batch.num_micro_batches)
        self._exact_sums: ExactSums | None = None
        self.buffers = buffers = StepBuffers(generation, assembly)
        self.passes: Passes = (
            LocalPasses(generation, assembly, self._exact, buffers)
            if generation.layout.pp == 1
            else PipelinePasses(generation, assembly, calls, buffers)
        )
        self._partial_gradients = PartialGradients(assembly, generation.meshes)
        self._copies = assembly.copies()
        self._trained = trained
        self._updated = _Updated(generation, assembly, trained)
        self._metrics = self._updated.metrics(0)
        self.metric_sums = torch.zeros(0, dtype=torch.float64, device=generation.device)
        """Float64 of shape (n,): this rank's share of the task's metrics in the last `run`, each a mean times `weight`;
        before them that of the weight itself, if losses have weights."""

    def run(self, step: int, scale: float = 1.0, *, is_voted: bool = False) -> Tensor:
        """Run all micro-batches of this rank in the step that follows `step` completed ones. `is_voted`: a vote follows
        that tells all ranks of `has_deviated`.

        Returns this rank's share of the mean loss, a scalar on the device; the shares of all ranks add up to it, times
        `weight`.
        """
        self._metrics = self._updated.metrics(step)
        for part in self._assembly.parts:
            forget_load(part)
        self.buffers.begin()
        if self._assembly.rounded is not None:
            self._assembly.rounded.begin_step(step)
        others = self._updated.others(step)
        self._exact_sums = None
        if self._exact is None:
            shares = self.passes.run_micro_batches(step, self.batches, scale, is_voted=is_voted)
            for parameter in others.values():  # their part of the gradient of another optimizer's loss
                parameter.grad = None
            self._partial_gradients.add_up()
        else:
            self._exact.skipped = others.keys()
            while self._exact_sums is None:  # the largest gradient, and so the grid, is known only after a pass
                self._exact.begin()
                self.buffers.begin()
                shares = self.passes.run_micro_batches(step, self.batches, scale)
                self._exact_sums = self._exact.reduce([share.loss for share in shares])
        for part in self._assembly.parts:
            sum_load(part, self._generation.meshes.sum_over_data_ranks)
        self._agree(shares, step)
        if self._exact_sums is None:
            self.metric_sums = self._metrics.sums(shares)
            return torch.stack([share.loss for share in shares]).sum() if shares else self._zero()
        if self._metrics.num_sums:
            totals = sums_over_ranks(self._metrics.columns(shares))
            self.metric_sums = torch.stack([self._from_rank_0(total) for total in totals])
        return self._from_rank_0(self._exact_sums.loss)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The task's metrics by name, without those that are not finite. `sums`: `metric_sums` of all ranks, added
        up."""
        return self._metrics.by_name(sums, self.weight(sums))

    def weight(self, sums: Sequence[float]) -> float:
        """The mean weight of the step's micro-batches, which loss and gradients are still to be divided by. 1: losses
        are means; 0: nothing counts in this step. `sums`: as for `metrics`.

        Raises:
            TaskFailed: a weight was not allowed.
        """
        if not self._metrics.is_weighted:
            return 1.0
        with self._generation.user_code:
            return self._metrics.weight(sums)

    def uses(self) -> Tensor:
        """Returns this rank's numbers for the vote, float64: 1 for each trained parameter that it has used, and those
        of the buffers. The sum over ranks is for `learn` and `drop_unused`."""
        used = {key for axis in self._assembly.data_axes for key in axis.used_parameters()}
        is_exact = self._exact is not None  # then FSDP sums nothing, and no rank has zeros for what it has not used
        names = {
            name
            for name, parameter in self._assembly.all_parameters()
            if parameter.grad is not None and (is_exact or id(parameter) in used)
        }
        used_names = torch.tensor([float(name in names) for name in self._trained], dtype=torch.float64)
        return torch.cat([to_device(used_names, self._generation.device), self.buffers.send()])

    def learn(self, uses: Sequence[float]) -> bool:
        """Called after the vote: learns which buffers change. Returns whether the step must be repeated, because one
        was written without torch's notice. `uses`: the sum of all ranks' `uses`.

        Raises:
            TaskFailed: the change of a buffer cannot be added up.
        """
        with self._generation.user_code:
            return self.buffers.learn(uses[len(self._trained) :])

    def drop_unused(self, uses: Sequence[float], step: int) -> None:
        """Called after the vote, before the update: removes the gradient of each parameter that no rank has used in the
        step. `uses`: the sum of all ranks' `uses`."""
        unused = [name for name, count in zip(self._trained, uses, strict=False) if not count]
        if not unused:
            return
        for name, parameter in self._assembly.all_parameters():
            if name in unused:
                parameter.grad = None
        if self._updated.is_first(step):
            self._remark([name for name in unused if name in self._updated.names(step)])

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

    def run_forward(self, step: int, index: int) -> Tensor:
        """Returns this rank's share of the loss of any micro-batch of a step, as training computes it, without a
        gradient.

        Called by all ranks together; after the last call, `reshard`."""
        generation = self._generation
        generation.check()
        generation.position.enter(Phase.FORWARD)
        seed_everything(randomness_seed(generation.spec.seed, step, index))
        with generation.user_code:
            batch = self.batches.training(generation.spec, step, index)
        return self.passes.run_forward(batch).loss

    def reshard(self) -> None:
        """See `Assembly.reshard`."""
        self._assembly.reshard()

    def balance(self) -> None:
        """Called by all ranks right before the optimizer's step: what a step changes in the model beside its
        parameters."""
        for part in self._assembly.parts:
            move_biases(part)
        self.buffers.apply()

    def forget(self) -> None:
        """Called before a step is repeated or skipped, because later backward passes would add to the gradients."""
        for parameter in self._assembly.parameters():
            parameter.grad = None

    def _agree(self, shares: Sequence[Share], step: int) -> None:
        with self._generation.user_code:
            self._metrics.agree(shares)
            if self._metrics.is_weighted and any(map(has_balance_loss, self._assembly.parts)):
                raise ValueError(
                    'model.balance is "loss": the balance loss of the experts is a mean, and loss() returns '
                    "(sum, weight), so the two would not count alike. Set model.balance to bias, or return a mean."
                )
        self._generation.check()
        if step == 0 and self._metrics.is_weighted:
            self._generation.say(
                "loss() returns (sum, weight): sums are divided by weights. A metric would belong in a dict."
            )

    def _remark(self, unused: Sequence[str]) -> None:
        """Called after the first step: names the parameters without a gradient in the log. Such a
        parameter is a mistake more often than not. An expert may have got no token."""
        if self._generation.plan.experts or not unused:
            return
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        self._generation.say(
            f"{len(unused)} parameters got no gradient in the first step and are not trained until they get one: "
            f"{', '.join(unused[:_SHOWN])}{more}. Use them in forward(), leave them out of the model, or set "
            "requires_grad_(False) if this is meant."
        )

    def _from_rank_0(self, total: float) -> Tensor:
        """Rank 0 contributes the total and the others zero, so the sum over ranks is exact in any order."""
        return self._zero() + total if self._generation.rank == 0 else self._zero()

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._generation.device)


class _Updated:
    """Which parameters each step updates: all, or with alternating updates those of one optimizer. Each optimizer has
    metrics of its own."""

    def __init__(self, generation: Generation, assembly: Assembly, trained: Sequence[str]) -> None:
        task, device, writes_log = generation.task, generation.device, generation.rank == 0
        self._alternation = task.alternation
        self._trained = frozenset(trained)
        self._members: dict[str, frozenset[str]] = {}
        self._others: dict[str, dict[int, nn.Parameter]] = {"": {}}
        self._metrics: dict[str, Metrics] = {}
        if self._alternation is None:
            self._metrics[""] = task.metrics(device, writes_log=writes_log)
            return
        with generation.user_code:
            self._members = self._alternation.members(trained)
        for parameter, own in self._members.items():
            self._metrics[parameter] = task.metrics(device, writes_log=writes_log, of_steps=True)
            self._others[parameter] = {
                id(parameter): parameter for name, parameter in assembly.all_parameters() if name not in own
            }

    def _name(self, step: int) -> str:
        return "" if self._alternation is None else self._alternation.name(step)

    def metrics(self, step: int) -> Metrics:
        return self._metrics[self._name(step)]

    def others(self, step: int) -> Mapping[int, nn.Parameter]:
        """The parameters that the step does not update, by id."""
        return self._others[self._name(step)]

    def names(self, step: int) -> frozenset[str]:
        return self._members.get(self._name(step), self._trained)

    def is_first(self, step: int) -> bool:
        """Return whether the step is the first one that updates these parameters."""
        return step == 0 if self._alternation is None else self._alternation.is_first(step)


class PartialGradients:
    """Sums the partial gradients of one generation."""

    def __init__(self, assembly: Assembly, meshes: Meshes) -> None:
        partial = (module._parameters[name] for module, name in assembly.partial)
        self._partial = [parameter for parameter in partial if parameter is not None]
        self._tp = meshes.tp.get_group() if meshes.tp is not None else None
        self._pp = meshes.pp.get_group() if meshes.pp is not None else None
        self._shared = _groups(assembly.shared_copies())

    @torch.no_grad()
    def add_up(self) -> None:
        """Sums the gradients in place. A collective of all ranks, once per step."""

        if self._tp is not None:
            self._over_tp(self._tp)
        if self._pp is not None and self._shared:
            self._over_stages(self._pp)

    def _over_tp(self, group: dist.ProcessGroup) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parameter in self._partial:
            if parameter.grad is not None:
                by_dtype[parameter.grad.dtype].append(_gradient(parameter))
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=group)
            _spread(flat, gradients)

    def _over_stages(self, group: dist.ProcessGroup) -> None:
        """Every rank adds the same summands in the same order, so that all copies keep the same bits."""
        flats = [_flat(shared.parameters) for shared in self._shared]
        gathered = [
            [flat if rank == group.rank() else torch.empty_like(flat) for rank in shared.ranks]
            for shared, flat in zip(self._shared, flats, strict=True)
        ]
        exchange = []
        for shared, summands in zip(self._shared, gathered, strict=True):
            for rank, summand in zip(shared.ranks, summands, strict=True):
                if rank != group.rank():
                    peer = dist.get_global_rank(group, rank)
                    exchange.append(dist.P2POp(dist.isend, summands[shared.ranks.index(group.rank())], peer, group))
                    exchange.append(dist.P2POp(dist.irecv, summand, peer, group))
        if exchange:
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
        for shared, summands in zip(self._shared, gathered, strict=True):
            flat = summands[0]
            for summand in summands[1:]:
                flat = flat + summand
            _spread_to_copies(flat, shared.parameters)


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters of one dtype that the same pipeline ranks have."""

    ranks: tuple[int, ...]
    parameters: tuple[SharedParameter, ...]


def _groups(shared: Sequence[SharedParameter]) -> list[_Group]:
    """The groups in an order that all their ranks agree on."""
    groups: dict[tuple[tuple[int, ...], str], list[SharedParameter]] = defaultdict(list)
    for parameter in shared:
        groups[parameter.ranks, str(parameter.copies[0].dtype)].append(parameter)
    return [_Group(ranks, tuple(parameters)) for (ranks, _), parameters in sorted(groups.items(), key=lambda i: i[0])]


def _flat(parameters: Sequence[SharedParameter]) -> Tensor:
    """Returns this rank's summand of every gradient, then for each parameter 1 if it has any: a parameter that no stage
    has used keeps no gradient."""
    pieces: list[Tensor] = []
    is_there: list[float] = []
    for shared in parameters:
        present = [_gradient(parameter) for parameter in shared.copies if parameter.grad is not None]
        summand = present[0] if present else torch.zeros_like(local(shared.copies[0]))
        for gradient in present[1:]:
            summand = summand + gradient
        pieces.append(summand.reshape(-1))
        is_there.append(1.0 if present else 0.0)
    return torch.cat([*pieces, pieces[0].new_tensor(is_there)])


def _spread_to_copies(flat: Tensor, parameters: Sequence[SharedParameter]) -> None:
    *pieces, is_there = torch.split(
        flat, [*(local(copied.copies[0]).numel() for copied in parameters), len(parameters)]
    )
    for shared, piece, count in zip(parameters, pieces, is_there.tolist(), strict=True):
        for parameter in shared.copies if count else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = _gradient(parameter)
            gradient.copy_(piece.view_as(gradient))


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return local(gradient)


def _spread(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@dataclass(frozen=True, slots=True)
class Gradients:
    """This rank's shards of all gradients that exist."""

    by_share: dict[float, list[Tensor]]
    """The shards by their share of a squared norm, which is 1 / the number of ranks that hold the same values."""

    @staticmethod
    @torch.no_grad()
    def of(shares: Iterable[tuple[nn.Parameter, float]]) -> Gradients:
        by_share: dict[float, list[Tensor]] = defaultdict(list)
        for parameter, share in shares:
            gradient = parameter.grad
            if gradient is not None:
                by_share[share].append(local(gradient))
        return Gradients(by_share)

    @torch.no_grad()
    def squared_norm(self, device: torch.device) -> Tensor:
        """Scalar float64: this rank's share of the sum of squares; the shares of all ranks add up to the model's."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for share, gradients in self.by_share.items():
            if share:  # tied copies have share 0, so each value counts once
                total += sum_squares(gradients, device) * share
        return total

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        if factor != 1.0:
            for gradients in self.by_share.values():
                torch._foreach_mul_(gradients, factor)
