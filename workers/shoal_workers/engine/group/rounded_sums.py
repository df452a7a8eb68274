"""Sums over ranks of which each number is sent in 8 bits: `reduce_precision: int8`.

    reduce-scatter   a rank rounds its summands and sends every other rank that rank's part (all-to-all); what a rank
                     receives it adds up in fp32, in the order of the ranks
    all-reduce       then each rank rounds its part of the sum, and all ranks gather the parts: the same bits everywhere

    block            BLOCK numbers and one fp32 scale, the largest / 127: 1.03 bytes for a number that was 4
    rounding         to one of the two next multiples of the scale, at random and so that the mean is exact: QSGD
                     (Alistarh et al. 2017), with the blocks of ZeRO++ (Wang et al. 2023)

Random numbers depend on seed, step and rank, and on how many sums the rank has begun in the step, so a step that is
repeated after a recovery has the same bits. With `shard: full` and units that run in an order of their own on each rank
the number of sums can differ after a recovery, and then losses differ by the rounding. Rounding
without a mean error needs no error feedback, whose residual would be a state that each rank has alone: a lost worker
would take its part along (docs/decisions/0012-sums-of-gradients.md). A number that is not finite makes its whole block
so.
Used by the plain replicas' buckets and given to FSDP2. Training thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.torch_internals import DefaultReduceScatter

BLOCK = 128
"""Numbers that share a scale."""
_LARGEST = 127
_SCALE_BYTES = 4
_STREAM = 0x18C7E5


class RoundedSums:
    """The rounded sums of one rank, over all its groups. Outlives generations, as the model does."""

    def __init__(self, seed: int) -> None:
        self._seed = seed ^ _STREAM
        self._step = self._num_drawn = 0

    def begin_step(self, step: int) -> None:
        self._step, self._num_drawn = step, 0

    def begin(self, rows: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        """Begin to add up on each rank the row of its number, of shape (ranks of the group, n), fp32. The returned
        function ends that and returns the sum, of n numbers and some zeros."""
        coded = self.encode(rows)
        received = torch.empty_like(coded)
        exchange = dist.all_to_all_single(received, coded, group=group, async_op=True)

        def add_up() -> Tensor:
            exchange.wait()
            total = decode(received[0])
            for row in received[1:]:
                total += decode(row)
            return total

        return add_up

    def all_reduce(self, flat: Tensor, group: dist.ProcessGroup) -> None:
        """Replace a 1-D tensor by its sum over the ranks. Numbers of another type than fp32 are not rounded."""
        if flat.dtype is not torch.float32:
            dist.all_reduce(flat, group=group)
            return
        work = RoundedAllReduce(self, flat, group)
        work.gather()
        work.wait()

    @torch.no_grad()
    def encode(self, rows: Tensor) -> Tensor:
        """Return int8 of shape (rows, bytes of a row): the rounded numbers, then their scales."""
        rows = _filled(rows, BLOCK)
        num_rows, size = rows.shape
        blocks = rows.view(num_rows, -1, BLOCK)
        scales = blocks.abs().amax(2).div_(_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        steps = torch.rand(blocks.shape, generator=self._generator(rows.device), device=rows.device)
        steps.addcdiv_(blocks, scales.unsqueeze(2)).floor_().clamp_(max=_LARGEST)
        coded = torch.empty((num_rows, size + _SCALE_BYTES * scales.size(1)), dtype=torch.int8, device=rows.device)
        coded[:, :size].copy_(steps.view(num_rows, size))
        coded[:, size:].view(torch.float32).copy_(scales)
        return coded

    def _generator(self, device: torch.device) -> torch.Generator:
        number = self._num_drawn * dist.get_world_size() + dist.get_rank()
        self._num_drawn += 1
        return torch.Generator(device).manual_seed(randomness_seed(self._seed, self._step, number))


def _filled(numbers: Tensor, multiple: int) -> Tensor:
    """Return them with zeros up to a multiple of numbers in the last dim; no copy if nothing is missing."""
    missing = -numbers.size(-1) % multiple
    return pad(numbers, (0, missing)) if missing else numbers


def decode(coded: Tensor) -> Tensor:
    """Return the numbers of `encode`, with the zeros that fill the last block of each row; rows in the same dims."""
    size = coded.size(-1) // (BLOCK + _SCALE_BYTES) * BLOCK
    scales = coded[..., size:].view(torch.float32).unsqueeze(-1)
    blocks = coded[..., :size].float().view(*scales.shape[:-1], BLOCK)
    return blocks.mul_(scales).flatten(-2)


class RoundedAllReduce:
    """The all-reduce of a 1-D fp32 tensor in place: begun when made, then `gather`, then `wait`, on all ranks alike."""

    def __init__(self, sums: RoundedSums, flat: Tensor, group: dist.ProcessGroup) -> None:
        self._sums, self._flat, self._group = sums, flat, group
        self._add_up = sums.begin(_filled(flat, group.size() * BLOCK).view(group.size(), -1), group)
        self._parts = flat.new_empty(0)
        self._work: dist.Work | None = None

    def gather(self) -> None:
        """Wait for the summands of this rank's part, and send the part."""
        coded = self._sums.encode(self._add_up().unsqueeze(0))
        self._parts = coded.new_empty((self._group.size(), coded.size(1)))
        self._work = dist.all_gather_single(self._parts, coded, group=self._group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._flat.copy_(decode(self._parts).flatten()[: self._flat.numel()])


class RoundedReduceScatter(DefaultReduceScatter):
    """The collective for FSDPModule.set_custom_reduce_scatter. Numbers of another type than fp32 are not rounded."""

    def __init__(self, sums: RoundedSums, otherwise: DefaultReduceScatter) -> None:
        self._sums, self._otherwise = sums, otherwise

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        if async_op or op != dist.ReduceOp.SUM or input_tensor.dtype is not torch.float32:
            return self._otherwise(output_tensor, input_tensor, group, op, async_op)
        total = self._sums.begin(input_tensor.view(group.size(), -1), group)()
        output_tensor.copy_(total[: output_tensor.numel()])
        return None
