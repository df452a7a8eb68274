"""The vote: one small all-reduce per step in which every rank says how its half of the step went.

    rank 0  [loss, norm^2, bad, yield, save] \\
    rank 1  [loss, norm^2, bad, yield, save]  >  sum  ->  the same verdict on every rank
    rank 2  [loss, norm^2, bad, yield, save] /

It comes after the gradients are reduced and before anything is mutated. So when it completes, every rank has finished
its backward pass, and when it does not, no rank has moved: the step can be done again. It replaces the all-reduce that
clipping needs anyway, therefore it costs nothing. The ones add up to the world size: an aborted NCCL communicator
returns from a collective as if nothing had happened, with whatever was in the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank says. Tensors may live on the device; nothing is waited for before the exchange."""

    loss_sum: Tensor
    """Scalar: sum of the losses of this rank's real micro-batches, each over num_micro_batches."""
    squared_norm: Tensor
    """Scalar float64: squared L2 norm of this rank's gradient shards."""
    wants_yield: bool
    wants_save: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks together say; equal on every rank."""

    loss: float
    grad_norm: float
    is_finite: bool
    yields: bool
    saves: bool


def hold_vote(ballot: Ballot, world_size: int) -> Verdict:
    """All ranks, once per step. Raises DistError if not everybody's ballot was counted."""
    loss, norm = ballot.loss_sum.double(), ballot.squared_norm
    is_bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
    words = torch.tensor([1.0, ballot.wants_yield, ballot.wants_save], dtype=torch.float64, device=norm.device)
    box = torch.cat([words, torch.stack([loss, norm, is_bad.double()])])
    dist.all_reduce(box)
    num_present, num_yield, num_save, total_loss, total_norm, num_bad = box.tolist()
    if num_present != world_size:
        raise dist.DistError(f"the vote counted {num_present:g} of {world_size} ranks: the communicator was aborted")
    return Verdict(
        loss=total_loss,
        grad_norm=total_norm**0.5 if total_norm >= 0 else total_norm,
        is_finite=num_bad == 0,
        yields=num_yield > 0,
        saves=num_save > 0,
    )
