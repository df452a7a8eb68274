"""What every rank has, on every rank: for values that are small, or exchanged rarely.

Called for the names of a task's metrics, for those of the buffers that a forward pass changes, for the positions of
streams, for checks of the numbers that ranks compute, and by proofs.
"""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_values(value: T) -> list[T]:
    """All ranks: the value of each, by rank. Two all-gathers, on the ranks' devices; none if there is one rank."""
    world_size = dist.get_world_size()
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values
