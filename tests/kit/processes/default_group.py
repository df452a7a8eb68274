"""Counts the collectives of a worker process on torch's default group. Called by tests, in worker processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_counts: list[int] = []


def watch() -> None:
    """Call it once, before the first group is destroyed."""
    plain_destroy = dist.destroy_process_group

    def destroy(*arguments: Any) -> None:
        world = dist.group.WORLD
        if not arguments and world is not None and world.size() > 1:
            # gloo counts them, whoever calls: Shoal, a task, FSDP2, or C++ code of torch.
            _counts.append(world._get_sequence_number_for_group())
        plain_destroy(*arguments)

    dist.destroy_process_group = destroy


def counts() -> list[int]:
    """Return the number of collectives on each default group of several ranks that was destroyed since `watch`."""
    return list(_counts)
