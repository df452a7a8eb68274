"""The layout of the gradients in a log's entries, and the platform on which they have the same effect bit for bit.

Called by the engine, which writes entries, and by `replay` and the receiver.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import torch
from torch import Tensor

from shoal_workers.snapshot_store.log.records import LoggedGroup, LoggedOptimizer, LoggedParameter, LogHead


def head_of(
    groups: Sequence[LoggedGroup],
    parameters: Sequence[tuple[str, int, Sequence[int]]],
    *,
    commit_room: int,
    optimizer: LoggedOptimizer | None = None,
) -> LogHead:
    """`parameters`: name, number of the group, sizes of the shard. `groups`: none with an `optimizer`."""
    num_threads, torch_version, cpu_capability = platform()
    return LogHead(
        groups=tuple(groups),
        optimizer=optimizer,
        parameters=tuple(
            LoggedParameter(name=name, group=group, sizes=tuple(sizes)) for name, group, sizes in parameters
        ),
        num_elements=sum(prod(sizes) for _, _, sizes in parameters),
        commit_room=commit_room,
        num_threads=num_threads,
        torch_version=torch_version,
        cpu_capability=cpu_capability,
    )


def views_of(
    gradients: Tensor, head: LogHead, counts: Sequence[int], unused: Collection[int] = ()
) -> list[Tensor | None]:
    """By parameter: its gradient in the payload of an entry; None: its count is 0 and it is not among `unused`."""
    views: list[Tensor | None] = []
    end = 0
    for number, (one, count) in enumerate(zip(head.parameters, counts, strict=True)):
        if not count and number not in unused:
            views.append(None)
            continue
        start, end = end, end + prod(one.sizes)
        views.append(gradients[start:end].view(one.sizes))
    return views


def platform() -> tuple[int, str, str]:
    """Of this process, as `LogHead.platform`."""
    return torch.get_num_threads(), str(torch.__version__), torch.backends.cpu.get_cpu_capability()
