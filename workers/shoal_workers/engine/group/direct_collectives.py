"""Runs collectives of small tensors on gloo without a ring: every rank sends to every other.

gloo passes parts around a ring, with n - 1 rounds to gather and 2 (n - 1) to sum. In each round each process waits for
its neighbour, so a group of n pays n (n - 1) wake-ups or twice as many at any size. An all-to-all has one round: a
process that wakes up finds the messages of many others. `python bench/group/direct_collectives.py` compares the two.

    all-gather       a rank sends its part to every other rank
    reduce-scatter   a rank sends every other rank the summand of that rank's part, and adds up what it receives
    all-reduce       a rank sends its whole tensor to every other rank; a large one is reduce-scattered, then gathered

Each allocates as many bytes as its larger tensor has, so tensors above a limit go around the ring, as those on a GPU
do. The limit of a reduce-scatter is higher. All ranks choose the same way, because their sizes are equal. The waits of
these collectives can be timed and left (see collectives.py), and unlike gloo's reduce-scatter they need no other thread
for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_workers.torch_internals import DefaultAllGather, DefaultReduceScatter

MAX_BYTES = 4 << 20
"""Limit for the larger tensor. Below it, all-gather and all-reduce are faster at every measured size of a group (4 to
32)."""
MAX_SCATTERED_BYTES = 32 << 20
"""Limit for a reduce-scatter, for which gloo's ring moves a whole all-reduce. Direct, it takes half of the CPU time at
6 and 16 MiB (3, 4 and 8 ranks), two thirds at 48 MiB. An all-gather gains nothing above MAX_BYTES."""
_MAX_REPEATED_BYTES = 1 << 20
"""Limit for all copies of a tensor that is reduced in one round."""
_MIN_RANKS = 3
"""A ring of two ranks also has one round."""


class DirectAllGather(DefaultAllGather):
    """The collective for FSDPModule.set_custom_all_gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if async_op or not _is_direct(output_tensor, group):
            return super().__call__(output_tensor, input_tensor, group, async_op)
        _all_gather(output_tensor, input_tensor, group)
        return None


class DirectReduceScatter(DefaultReduceScatter):
    """The collective for FSDPModule.set_custom_reduce_scatter. `max_bytes`: larger tensors go around the ring."""

    def __init__(self, max_bytes: int = MAX_SCATTERED_BYTES) -> None:
        self._max_bytes = max_bytes

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Add up the summands, in fp32 if the tensors have fewer bits."""
        if async_op or op != dist.ReduceOp.SUM or not _is_direct(input_tensor, group, self._max_bytes):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        summands = torch.empty_like(input_tensor)
        dist.all_to_all_single(summands, input_tensor, group=group)
        torch.sum(summands.view(group.size(), -1), 0, out=output_tensor)
        return None


def begin_all_reduce_small(tensor: Tensor, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Begin to replace a 1-D tensor by its sum over the group's ranks, with the same bits on every rank; the returned
    function completes it. `group`: None means torch's default group.

    With one round, the collective runs in between. With two rounds, the returned function runs all of it.
    """
    group = dist.group.WORLD if group is None else group
    if group is None or not _is_direct(tensor, group):
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return lambda: _wait(work)
    num_ranks = group.size()
    if tensor.nbytes * num_ranks > _MAX_REPEATED_BYTES:
        return lambda: _all_reduce_in_two_rounds(tensor, group)
    summands = tensor.new_empty(num_ranks * tensor.numel())
    exchange = dist.all_to_all_single(summands, torch.cat([tensor] * num_ranks), group=group, async_op=True)

    def add_up() -> None:
        _wait(exchange)
        _add_rows(summands.view(num_ranks, -1), tensor)

    return add_up


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _all_reduce_in_two_rounds(tensor: Tensor, group: dist.ProcessGroup) -> None:
    num_ranks = group.size()
    size = -(-tensor.numel() // num_ranks)
    whole = tensor.new_zeros(num_ranks * size)
    whole[: tensor.numel()] = tensor
    summands = torch.empty_like(whole)
    dist.all_to_all_single(summands, whole, group=group)
    _all_gather(whole, _add_rows(summands.view(num_ranks, -1), whole.new_empty(size)), group)
    tensor.copy_(whole[: tensor.numel()])


def _is_direct(tensor: Tensor, group: dist.ProcessGroup, max_bytes: int = MAX_BYTES) -> bool:
    return tensor.device.type == "cpu" and group.size() >= _MIN_RANKS and tensor.nbytes <= max_bytes


def _all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(output, part.repeat(group.size()), group=group)


def _add_rows(rows: Tensor, total: Tensor) -> Tensor:
    """Add the rows one by one, so that processors with other vector units add in the same order."""
    first, *others = rows.unbind()
    total.copy_(first)
    for row in others:
        total += row
    return total
