"""The vote: one small all-reduce per step in which every rank says how its half of the step went.

    rank 0  [1, bad, loss, norm^2, requests ... | its seconds at place 0 of W] \\
    rank 1  [1, bad, loss, norm^2, requests ... | its seconds at place 1 of W]  >  sum  ->  the same verdict everywhere
    rank 2  [1, bad, loss, norm^2, requests ... | its seconds at place 2 of W] /

It comes after the gradients are reduced and before anything is mutated. So when it completes, every rank has finished
its backward pass, and when it does not, no rank has moved: the step can be done again. It replaces the all-reduce that
clipping needs anyway, therefore it costs nothing. The ones add up to the world size: an aborted NCCL communicator
returns from a collective as if nothing had happened, with whatever was in the buffer.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

_NUM_SECONDS = 3


@dataclass(frozen=True, slots=True)
class Requests:
    """What one rank wants to happen after the step; it happens if anybody wants it."""

    yields: bool = False
    """Stop at this step boundary."""
    durably: bool = False
    """... with a durable checkpoint part."""
    saves: bool = False
    snapshots: bool = False
    """Copy the state into memory."""
    replicates: bool = False
    """... and send it to the buddy; not while anybody still sends: after the loss of a node only a step helps of which
    every rank's copy has arrived."""
    is_sending: bool = False
    lacks_copy: bool = False
    """Of this generation's snapshots none has arrived at its buddy yet."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank says. Tensors may live on the device; nothing is waited for before the exchange."""

    loss_sum: Tensor
    """Scalar: sum of the losses of this rank's real micro-batches, each over num_micro_batches."""
    squared_norm: Tensor
    """Scalar float64: squared L2 norm of this rank's gradient shards."""
    requests: Requests
    compute_s: float
    """Seconds of this step that the rank did not wait for others."""
    copy_s: float
    """Seconds that a snapshot has kept its training thread busy since the last vote; 0: none was taken."""
    send_s: float
    """CPU seconds of a copy that has reached the buddy since the last vote; 0: none has."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks together say; equal on every rank."""

    loss: float
    grad_norm: float
    is_finite: bool
    requests: Requests
    compute_s: tuple[float, ...]
    """By rank."""
    copy_s: float
    """The slowest rank's."""
    send_s: float


def hold_vote(ballot: Ballot, rank: int, world_size: int) -> Verdict:
    """All ranks, once per step. Raises DistError if not everybody's ballot was counted."""
    loss, norm = ballot.loss_sum.double(), ballot.squared_norm
    is_bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
    seconds = [0.0] * (_NUM_SECONDS * world_size)
    seconds[_NUM_SECONDS * rank : _NUM_SECONDS * (rank + 1)] = [ballot.compute_s, ballot.copy_s, ballot.send_s]
    words = torch.tensor([1.0, *astuple(ballot.requests), *seconds], dtype=torch.float64, device=norm.device)
    box = torch.cat([torch.stack([loss, norm, is_bad.double()]), words])
    dist.all_reduce(box)
    total_loss, total_norm, num_bad, num_present, *rest = box.tolist()
    if num_present != world_size:
        raise dist.DistError(f"the vote counted {num_present:g} of {world_size} ranks: the communicator was aborted")
    num_requests = len(fields(Requests))
    wished, told = rest[:num_requests], rest[num_requests:]
    return Verdict(
        loss=total_loss,
        grad_norm=total_norm**0.5 if total_norm >= 0 else total_norm,
        is_finite=num_bad == 0,
        requests=Requests(*(count > 0 for count in wished)),
        compute_s=tuple(told[0::_NUM_SECONDS]),
        copy_s=max(told[1::_NUM_SECONDS]),
        send_s=max(told[2::_NUM_SECONDS]),
    )
