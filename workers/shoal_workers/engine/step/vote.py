"""The vote: one small all-reduce per step in which every rank contributes its results and its requests.

    rank 0  [1, bad, loss, norm^2, requests ... | its figures at index 0 of W] \\
    rank 1  [1, bad, loss, norm^2, requests ... | its figures at index 1 of W]  >  sum  ->  the same verdict everywhere
    rank 2  [1, bad, loss, norm^2, requests ... | its figures at index 2 of W] /

It comes after the gradients are reduced and before anything is changed. If it completes, every rank has finished its
backward pass; if it does not, as when a rank has died, no rank has changed anything, `Engine.run` ends with
COLLECTIVE_FAILED, and the next group repeats the step from the state before it. It replaces the all-reduce
that clipping needs, so it costs nothing extra; on gloo every rank sends its box to every other one at once, with NCCL
it goes along the axes of the mesh. The ones add up to the world size: an aborted NCCL communicator returns from a
collective without an error, with arbitrary values in the buffer. Called by the trainer, and by each update of a loop
of the user's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_workers.engine.group.all_ranks import Reduction, all_ranks
from shoal_workers.engine.parallel.device_copies import to_device

_NUM_FIGURES = 8
"""Numbers that each rank contributes at an index of its own."""
NOTHING_ARRIVED = -1.0
NO_BUDDY = math.inf


@dataclass(frozen=True, slots=True)
class Requests:
    """What one rank requests after the step; it happens if any rank requests it."""

    yields: bool = False
    """Stop at this step boundary."""
    durably: bool = False
    """Stop with a durable checkpoint part."""
    saves: bool = False
    snapshots: bool = False
    """Copy the state into memory."""
    replicates: bool = False
    """Also send the copy to the buddy, unless any rank is still sending: after the loss of a node only a step of which
    every rank's copy has arrived can be restored."""
    is_sending: bool = False
    lacks_memory: bool = False
    """No copies any more: a snapshot is whole only with the part of every rank."""
    varies: bool = False
    """The model has run other blocks than in the pass before: the ranks keep its parameters whole, and repeat the
    step."""
    lacks_round: bool = False
    """The round that the islands merge in next is not closed, or not read here."""


_requests_of = attrgetter(*(field.name for field in fields(Requests)))


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank contributes. Tensors may be on the device; nothing waits for them before the exchange."""

    loss_sum: Tensor
    """Scalar: sum of the losses of this rank's real micro-batches, each over num_micro_batches."""
    squared_norm: Tensor
    """Scalar float64: squared L2 norm of this rank's gradient shards."""
    requests: Requests
    compute_s: float
    """Seconds of this step, on a GPU of the one before, in which the rank did not wait for others."""
    copy_s: float
    """Seconds for which a snapshot kept the training thread busy since the last vote; 0: none was taken."""
    send_s: float
    """CPU seconds of a copy that reached the buddy since the last vote; 0: none did."""
    arrived_step: float = NO_BUDDY
    """Step of the newest copy of this generation that reached the buddy; NOTHING_ARRIVED, or NO_BUDDY."""
    data_s: float = 0.0
    """Seconds of `compute_s` in which the rank made batches."""
    cpu_wait_s: float = 0.0
    """Seconds since the last vote in which its training thread waited for a CPU."""
    saving_s: float = 0.0
    """Seconds since the last vote in which a checkpoint kept it."""
    metrics: Tensor | None = None
    """Float64 of shape (n,), with the same n on every rank: this rank's share of the weights, if losses have any, and
    of the task's own metrics."""
    uses: Tensor | None = None
    """Float64 of shape (n,), with the same n on every rank: 1 for each parameter that it has used, and numbers of its
    buffers."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The sum of all ballots; equal on every rank."""

    loss: float
    grad_norm: float
    is_finite: bool
    requests: Requests
    compute_s: tuple[float, ...]
    """Seconds by rank."""
    copy_s: float
    """The slowest rank's."""
    send_s: float
    arrived_steps: tuple[float, ...] = ()
    """The value in each rank's ballot, by rank."""
    data_s: tuple[float, ...] = ()
    cpu_wait_s: tuple[float, ...] = ()
    saving_s: tuple[float, ...] = ()
    not_finite: tuple[int, ...] = ()
    """Ranks whose own part of the loss is not finite."""
    metrics: tuple[float, ...] = ()
    """Sums of the ballots' metrics. `is_finite` leaves them out, because a metric may have no value."""
    uses: tuple[float, ...] = ()
    """The sum of what the ballots had."""
    beside: tuple[float, ...] = ()
    """This rank's own numbers that were read with the sums."""

    def over(self, weight: float) -> Verdict:
        """The verdict on a step whose losses are sums: loss and gradient norm divided by the weight, and not finite if
        that is 0."""
        if weight == 1:
            return self
        if not weight:
            return replace(self, loss=math.nan, grad_norm=math.nan, is_finite=False)
        return replace(self, loss=self.loss / weight, grad_norm=self.grad_norm / weight)


def hold_vote(ballot: Ballot, rank: int, world_size: int) -> Verdict:
    """Adds up the ballots of all ranks, once per step: a collective. Raises DistError if not every rank's ballot was
    counted."""
    return begin_vote(ballot, rank, world_size).counted()


def begin_vote(ballot: Ballot, rank: int, world_size: int) -> Vote:
    """The same in two parts: the collective has begun when this returns."""
    costs = [ballot.compute_s, ballot.copy_s, ballot.send_s, ballot.arrived_step]
    local_figures = [*costs, ballot.data_s, ballot.cpu_wait_s, ballot.saving_s, 0.0]
    words = [1.0, *map(float, _requests_of(ballot.requests))]
    head = _head if ballot.squared_norm.device.type == "cpu" else _head_on_device
    parts = [head(ballot, words, local_figures, rank, world_size), ballot.uses, ballot.metrics]
    given = [to_device(part, ballot.squared_norm.device) for part in parts if part is not None]
    box = given[0] if len(given) == 1 else torch.cat(given)
    return Vote(
        box, all_ranks().begin_all_reduce_small(box), world_size, 0 if ballot.uses is None else len(ballot.uses)
    )


def _head(ballot: Ballot, words: list[float], local_figures: list[float], rank: int, world_size: int) -> Tensor:
    """The box without what only some ballots have. The last of the local figures says whether this rank's loss is bad.
    Made in one go: each operation on a small tensor would take longer than all of the words."""
    loss, norm = float(ballot.loss_sum), float(ballot.squared_norm)
    local_figures[-1] = float(not math.isfinite(loss))
    is_bad = float(not (math.isfinite(loss) and math.isfinite(norm)))
    # Zeros at all other ranks' indices: the sum leaves each figure as it is, infinities included.
    figures = [0.0] * (_NUM_FIGURES * world_size)
    figures[_NUM_FIGURES * rank : _NUM_FIGURES * (rank + 1)] = local_figures
    return torch.tensor([loss, norm, is_bad, *words, *figures], dtype=torch.float64)


def _head_on_device(
    ballot: Ballot, words: list[float], local_figures: list[float], rank: int, world_size: int
) -> Tensor:
    """The same, without waiting for the device. The zeros are made there."""
    loss, norm = ballot.loss_sum.double(), ballot.squared_norm
    is_bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
    rest = to_device(torch.tensor([*words, *local_figures], dtype=torch.float64), norm.device)
    rest[-1] = (~torch.isfinite(loss)).double()
    figures = norm.new_zeros(_NUM_FIGURES * world_size)
    figures[_NUM_FIGURES * rank : _NUM_FIGURES * (rank + 1)] = rest[len(words) :]
    return torch.cat([torch.stack([loss, norm, is_bad.double()]), rest[: len(words)], figures])


class Vote:
    """A vote that has begun."""

    def __init__(self, box: Tensor, reduction: Reduction, world_size: int, num_uses: int) -> None:
        self._box = box
        self._reduction = reduction
        self._world_size = world_size
        self._num_uses = num_uses

    def counted(self, beside: Tensor | None = None) -> Verdict:
        """Waits for the other ranks, and for the device: once, also for `beside`, float64 of shape (n,) on the device.
        Raises as `hold_vote` does."""
        self._reduction.wait()
        size = len(self._box)
        row = (self._box if beside is None else torch.cat([self._box, beside])).tolist()
        verdict = _verdict(row[:size], self._world_size, self._num_uses)
        return verdict if beside is None else replace(verdict, beside=tuple(row[size:]))


def _verdict(sums: list[float], world_size: int, num_uses: int) -> Verdict:
    total_loss, total_norm, num_bad, num_present, *rest = sums
    if num_present != world_size:
        raise dist.DistError(f"the vote counted {num_present:g} of {world_size} ranks: the communicator was aborted")
    num_requests = len(fields(Requests))
    end = num_requests + _NUM_FIGURES * world_size
    request_counts, all_figures, others = rest[:num_requests], rest[num_requests:end], rest[end:]
    return Verdict(
        loss=total_loss,
        grad_norm=total_norm**0.5 if total_norm >= 0 else total_norm,
        is_finite=num_bad == 0,
        requests=Requests(*(count > 0 for count in request_counts)),
        compute_s=tuple(all_figures[0::_NUM_FIGURES]),
        copy_s=max(all_figures[1::_NUM_FIGURES]),
        send_s=max(all_figures[2::_NUM_FIGURES]),
        arrived_steps=tuple(all_figures[3::_NUM_FIGURES]),
        data_s=tuple(all_figures[4::_NUM_FIGURES]),
        cpu_wait_s=tuple(all_figures[5::_NUM_FIGURES]),
        saving_s=tuple(all_figures[6::_NUM_FIGURES]),
        not_finite=tuple(other for other, bad in enumerate(all_figures[7::_NUM_FIGURES]) if bad),
        metrics=tuple(others[num_uses:]),
        uses=tuple(others[:num_uses]),
    )
