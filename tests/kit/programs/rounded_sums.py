"""Program of four gloo processes that add up tensors in 8 bits.

    python rounded_sums.py STORE_FILE

Rank 0's answer: {"sizes": {numbers: [largest difference from the sum relative to what four roundings may cost, whether
all ranks have the same bits]}, "scattered": the same difference of a reduce-scatter, "same_step" and "next_step":
whether the bits of a repeated sum are the same, "mean": difference of the mean of many sums from the sum, relative to
what the roundings of one sum may cost, "infinite": the numbers that are not finite, "bytes": what a rank receives over
its sockets, {collective: bytes for each number of the tensor}}.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from shoal_workers.engine.group.rounded_sums import BLOCK, RoundedAllReduce, RoundedReduceScatter, RoundedSums
from shoal_workers.torch_internals import DefaultReduceScatter

_WORLD = 4
_SIZES = (1, 127, 1000, 4 * BLOCK, 100_003)
_NUM_SUMS = 400
_LONG = 1 << 20
_RECEIVED = 128
"""Offset of `tcpi_bytes_received` in Linux's tcp_info."""


def _received_bytes() -> int:
    """What this process has received over the connections that it has."""
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        try:
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.fromfd(int(file.name), socket.AF_INET, socket.SOCK_STREAM) as end:
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        total += struct.unpack_from("Q", info, _RECEIVED)[0] if len(info) >= _RECEIVED + 8 else 0
    return total


def _bytes_of(collective: Callable[[], Any]) -> float:
    """What a rank receives, for each number of a tensor of `_LONG`."""
    dist.barrier()
    before = _received_bytes()
    collective()
    received = torch.tensor([_received_bytes() - before])
    dist.all_reduce(received)
    return received.item() / _WORLD / _LONG


def _summand(rank: int, count: int) -> Tensor:
    """Numbers of very different sizes."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    return values * torch.logspace(-6, 2, count)


def _all_reduce(sums: RoundedSums, flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    work = RoundedAllReduce(sums, flat, group)
    work.gather()
    work.wait()
    return flat


def _bound(summands: Tensor) -> Tensor:
    """What the roundings of the summands and of their sum may cost each number at most."""
    blocks = torch.nn.functional.pad(summands, (0, -summands.size(1) % BLOCK)).view(_WORLD, -1, BLOCK)
    steps = blocks.abs().amax(2).sum(0) * 2.02 / 127
    return steps.repeat_interleave(BLOCK)[: summands.size(1)]


def find(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    sums, answer = RoundedSums(5), dict[str, Any](sizes={})
    for count in _SIZES:
        summands = torch.stack([_summand(rank, count) for rank in range(_WORLD)])
        result = _all_reduce(sums, summands[rank].clone(), group)
        everywhere = torch.empty(_WORLD * count)
        dist.all_gather_single(everywhere, result)
        is_same = all(torch.equal(result, other) for other in everywhere.view(_WORLD, -1))
        cost = ((result - summands.sum(0)).abs() / _bound(summands)).max()
        answer["sizes"][count] = float(cost), is_same

    count = 3 * BLOCK + 5
    wholes = torch.stack([_summand(rank, _WORLD * count) for rank in range(_WORLD)])
    own, scatter = torch.empty(count), RoundedReduceScatter(sums, DefaultReduceScatter())
    scatter(own, wholes[rank], group, dist.ReduceOp.SUM)
    rows = wholes.view(_WORLD, _WORLD, count)[:, rank]
    answer["scattered"] = float(((own - rows.sum(0)).abs() / _bound(rows)).max())

    flat, repeated = _summand(rank, 1000), []
    for step in (7, 7, 8):
        sums.begin_step(step)
        repeated.append(_all_reduce(sums, flat.clone(), group))
    answer["same_step"], answer["next_step"] = (torch.equal(repeated[0], other) for other in repeated[1:])
    flat, part = _summand(rank, _LONG), torch.empty(_LONG // _WORLD)
    answer["bytes"] = {
        "all-reduce in fp32": _bytes_of(lambda: dist.all_reduce(flat.clone())),
        "all-reduce": _bytes_of(lambda: _all_reduce(sums, flat.clone(), group)),
        "reduce-scatter": _bytes_of(lambda: scatter(part, flat, group, dist.ReduceOp.SUM)),
    }

    count = 200
    summands = torch.stack([_summand(rank, count) for rank in range(_WORLD)])
    seen = torch.stack([_all_reduce(sums, summands[rank].clone(), group) for _ in range(_NUM_SUMS)]).double()
    answer["mean"] = float(((seen.mean(0) - summands.double().sum(0)).abs() / _bound(summands)).max())

    broken = torch.ones(4 * BLOCK * _WORLD)
    if rank == 1:
        broken[3], broken[2 * BLOCK] = float("inf"), float("nan")
    result = _all_reduce(sums, broken, group)
    answer["infinite"] = (~result.isfinite()).nonzero().flatten().tolist()
    return answer


if __name__ == "__main__":
    run_ranks(_WORLD, find)
