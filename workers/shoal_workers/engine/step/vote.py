"""Exchange the results and the requests of all ranks in one small all-reduce per step: the vote.

    rank 0  [1, bad, loss, norm^2, requests ... | the figures at index 0 of W] \\
    rank 1  [1, bad, loss, norm^2, requests ... | the figures at index 1 of W]  >  sum  ->  the same verdict everywhere
    rank 2  [1, bad, loss, norm^2, requests ... | the figures at index 2 of W] /

The vote comes after the gradients are reduced and before any state changes. If it completes, every rank has finished
its backward pass. If it fails, for example because a rank has died, no rank has changed its state: `Engine.run` ends
with COLLECTIVE_FAILED, and the next group repeats the step from the state before it.

The vote replaces the all-reduce that clipping needs, so it costs nothing extra. With gloo every rank sends its buffer
to every other rank at once; with NCCL the buffer goes along the axes of the mesh. The ones must add up to the world
size, because an aborted NCCL communicator returns from a collective without an error, with arbitrary values.
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
"""Numbers that each rank contributes at its index."""
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


_read_requests = attrgetter(*(field.name for field in fields(Requests)))


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
    """Seconds in which a snapshot kept the training thread busy since the last vote; 0 if none was taken."""
    send_s: float
    """CPU seconds of a copy that reached the buddy since the last vote; 0 if none did."""
    arrived_step: float = NO_BUDDY
    """Step of the newest copy of this generation that reached the buddy; NOTHING_ARRIVED, or NO_BUDDY."""
    data_s: float = 0.0
    """Seconds of `compute_s` in which the rank made batches."""
    cpu_wait_s: float = 0.0
    """Seconds since the last vote in which the training thread waited for a CPU."""
    saving_s: float = 0.0
    """Seconds since the last vote in which a checkpoint kept the training thread busy."""
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
    """`Ballot.arrived_step` of each rank."""
    data_s: tuple[float, ...] = ()
    cpu_wait_s: tuple[float, ...] = ()
    saving_s: tuple[float, ...] = ()
    not_finite: tuple[int, ...] = ()
    """Ranks whose own part of the loss is not finite."""
    metrics: tuple[float, ...] = ()
    """Sums of the ballots' metrics. `is_finite` leaves them out, because a metric may have no value."""
    uses: tuple[float, ...] = ()
    """Sums of the ballots' uses."""
    extra: tuple[float, ...] = ()
    """Numbers of this rank alone that were copied from the device together with the sums."""

    def divide_by(self, weight: float) -> Verdict:
        """Return the verdict on a step whose losses are sums: loss and gradient norm over the weight; not finite if the
        weight is 0."""
        if weight == 1:
            return self
        if not weight:
            return replace(self, loss=math.nan, grad_norm=math.nan, is_finite=False)
        return replace(self, loss=self.loss / weight, grad_norm=self.grad_norm / weight)


def hold_vote(ballot: Ballot, rank: int, world_size: int) -> Verdict:
    """Add up the ballots of all ranks: a collective, once per step. Raises DistError if a rank's ballot is missing."""
    return begin_vote(ballot, rank, world_size).count_ballots()


def begin_vote(ballot: Ballot, rank: int, world_size: int) -> Vote:
    """Begin `hold_vote`, and return while the collective runs; `Vote.count_ballots` ends it."""
    costs = [ballot.compute_s, ballot.copy_s, ballot.send_s, ballot.arrived_step]
    local_figures = [*costs, ballot.data_s, ballot.cpu_wait_s, ballot.saving_s, 0.0]
    flags = [1.0, *map(float, _read_requests(ballot.requests))]
    make_head = _make_head if ballot.squared_norm.device.type == "cpu" else _make_head_on_device
    parts = [make_head(ballot, flags, local_figures, rank, world_size), ballot.uses, ballot.metrics]
    tensors = [to_device(part, ballot.squared_norm.device) for part in parts if part is not None]
    buffer = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return Vote(
        buffer, all_ranks().begin_all_reduce_small(buffer), world_size, 0 if ballot.uses is None else len(ballot.uses)
    )


def _make_head(ballot: Ballot, flags: list[float], local_figures: list[float], rank: int, world_size: int) -> Tensor:
    """Return the part of the buffer that every ballot has.

    The last local figure becomes 1 if this rank's loss is not finite. One call makes the tensor, because each operation
    on a small one would take longer than all of its numbers.
    """
    loss, norm = float(ballot.loss_sum), float(ballot.squared_norm)
    local_figures[-1] = float(not math.isfinite(loss))
    is_bad = float(not (math.isfinite(loss) and math.isfinite(norm)))
    # Zeros at all other ranks' indices: the sum leaves each figure as it is, infinities included.
    figures = [0.0] * (_NUM_FIGURES * world_size)
    figures[_NUM_FIGURES * rank : _NUM_FIGURES * (rank + 1)] = local_figures
    return torch.tensor([loss, norm, is_bad, *flags, *figures], dtype=torch.float64)


def _make_head_on_device(
    ballot: Ballot, flags: list[float], local_figures: list[float], rank: int, world_size: int
) -> Tensor:
    """Return the same as `_make_head`, without waiting for the device. The zeros are made there."""
    loss, norm = ballot.loss_sum.double(), ballot.squared_norm
    is_bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
    rest = to_device(torch.tensor([*flags, *local_figures], dtype=torch.float64), norm.device)
    rest[-1] = (~torch.isfinite(loss)).double()
    figures = norm.new_zeros(_NUM_FIGURES * world_size)
    figures[_NUM_FIGURES * rank : _NUM_FIGURES * (rank + 1)] = rest[len(flags) :]
    return torch.cat([torch.stack([loss, norm, is_bad.double()]), rest[: len(flags)], figures])


class Vote:
    """A vote that has begun."""

    def __init__(self, buffer: Tensor, reduction: Reduction, world_size: int, num_uses: int) -> None:
        self._buffer = buffer
        self._reduction = reduction
        self._world_size = world_size
        self._num_uses = num_uses

    def count_ballots(self, extra: Tensor | None = None) -> Verdict:
        """Wait for the other ranks and for the device, and return the verdict. Raises DistError as `hold_vote` does.

        Args:
            extra: float64 of shape (n,) on the device, which is read in the same wait.
        """
        self._reduction.wait()
        size = len(self._buffer)
        row = (self._buffer if extra is None else torch.cat([self._buffer, extra])).tolist()
        verdict = _make_verdict(row[:size], self._world_size, self._num_uses)
        return verdict if extra is None else replace(verdict, extra=tuple(row[size:]))


def _make_verdict(sums: list[float], world_size: int, num_uses: int) -> Verdict:
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
        not_finite=tuple(rank for rank, is_bad in enumerate(all_figures[7::_NUM_FIGURES]) if is_bad),
        metrics=tuple(others[num_uses:]),
        uses=tuple(others[:num_uses]),
    )
