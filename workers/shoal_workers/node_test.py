"""The probation test of a node: tests whether it computes correct results and whether its messages arrive unchanged.

Two processes run it together, one on the suspected node and one on a healthy node:

    matmul       integers small enough to be exact in fp32, so every healthy machine gives the same bits exchange     a
    block of known bits from the suspected node to its partner, and one back all-reduce   over both, also exact; first
    with the suspected node as rank 0, then as rank 1 (the caller runs it twice)

Without another node only the matmul is run. Any different bit and any exception is a failed test. Called by the node
test's actor (service/shoal_service/gateway/ray_cluster.py) in a process of its own, which the caller kills if it hangs.
"""

from __future__ import annotations

import datetime
import zlib

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # mypy does not see TCPStore

from shoal_workers.engine.group.network_interface import choose_interface

_SIZE = 512
_ROUNDS = 8
_BLOCK = 1 << 20
_PATTERN_MOD = 251


def matmul_fault(device: str = "cpu") -> str:
    """Return the fault in words; empty: none. Products stay below 2^24, where fp32 is exact in any order of the
    sums."""
    left, right = _factor(7, 13), _factor(11, 3)
    exact = (left.to(torch.int64) @ right.to(torch.int64)).to(torch.float32)
    expected = zlib.crc32(exact.numpy().tobytes())
    on_device = left.to(device), right.to(device)
    for turn in range(_ROUNDS):
        product = (on_device[0] @ on_device[1]).cpu()
        if zlib.crc32(product.numpy().tobytes()) != expected:
            wrong = int((product != exact).sum())
            return f"matmul {turn + 1} of {_ROUNDS} on {device} has {wrong} of {exact.numel()} elements wrong"
    return ""


def pair_fault(rank: int, host: str, port: int, *, round_name: str, timeout_s: float) -> str:
    """Return the fault in words; empty: none. `rank` 0 hosts the store at `port`; both ranks call this at the same
    time."""
    timeout = datetime.timedelta(seconds=timeout_s)
    choose_interface(host, port)
    store = TCPStore(host, port, world_size=2, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=PrefixStore(round_name, store), rank=rank, world_size=2, timeout=timeout)
    try:
        fault = _exchange_fault(rank) or _all_reduce_fault(rank)
        dist.barrier()  # rank 0 hosts the store, so it must leave last
        return fault
    finally:
        dist.destroy_process_group()


def _exchange_fault(rank: int) -> str:
    for sender in (0, 1):
        if rank == sender:
            dist.send(_pattern(sender), dst=1 - sender)
        else:
            block = torch.empty(_BLOCK, dtype=torch.int32)
            dist.recv(block, src=sender)
            if not torch.equal(block, _pattern(sender)):
                return f"the block from rank {sender} arrived with other bits"
    return ""


def _all_reduce_fault(rank: int) -> str:
    expected = _pattern(0) + _pattern(1)
    for turn in range(_ROUNDS):
        total = _pattern(rank)
        dist.all_reduce(total)
        if not torch.equal(total, expected):
            return f"all-reduce {turn + 1} of {_ROUNDS} gave another sum"
    return ""


def _pattern(rank: int) -> torch.Tensor:
    return (torch.arange(_BLOCK, dtype=torch.int32) * (rank + 3)) % _PATTERN_MOD


def _factor(a: int, b: int) -> torch.Tensor:
    """Integers from -8 to 8, as fp32."""
    rows, columns = torch.arange(_SIZE).unsqueeze(1), torch.arange(_SIZE).unsqueeze(0)
    return ((rows * a + columns * b + rows * columns) % 17 - 8).to(torch.float32)
