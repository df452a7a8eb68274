"""Program of four gloo processes: collectives in which every rank sends to every other one, and what they must give.

    python direct_collectives.py STORE_FILE

Rank 0 prints one JSON line: {"gathered": bool, "scattered": largest difference, "reduced": {number of elements: largest
difference}, "equal": {number of elements: same bits on all ranks}, "calls": {case: names of the collectives called}}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.group.collectives import CollectiveLog, interruptible_waits, replace_wait
from shoal_workers.engine.group.direct_collectives import (
    MAX_BYTES,
    DirectAllGather,
    DirectReduceScatter,
)

_WORLD = 4
_SMALL, _LARGE = 1001, MAX_BYTES // 4 + 1
_REDUCED = (3, 1001, 1 << 16, MAX_BYTES // 8 + 1)
"""Float64: in one round, in one round, in two, around the ring."""


class _Names(CollectiveLog):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def called(self, method: str, arguments: tuple[Any, ...]) -> None:
        super().called(method, arguments)
        self.names.append(self.newest.name)


def _part(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def find(rank: int) -> dict[str, Any]:
    replace_wait()
    group = dist.group.WORLD
    assert group is not None
    calls: dict[str, list[str]] = {}

    def called(case: str, act: Callable[[], None]) -> None:
        log = _Names()
        with interruptible_waits(lambda: None, log):
            act()
        calls[case] = log.names

    gathered, scattered = True, 0.0
    scatter = DirectReduceScatter()
    for name, count in (("small", _SMALL), ("large", _LARGE)):
        parts = torch.stack([_part(one, count, torch.float32) for one in range(_WORLD)])
        output = torch.empty(_WORLD * count)
        called(f"all-gather, {name}", lambda: DirectAllGather()(output, parts[rank], group))  # noqa: B023
        gathered &= torch.equal(output, parts.view(-1))
        whole = [_part(10 + one, _WORLD * count, torch.float32) for one in range(_WORLD)]
        own = torch.empty(count)
        called(
            f"reduce-scatter, {name}",
            lambda: scatter(own, whole[rank], group, dist.ReduceOp.SUM),  # noqa: B023
        )
        expected = torch.stack(whole).double().sum(0).view(_WORLD, -1)[rank]
        scattered = max(scattered, float((own - expected).abs().max()))
        around = torch.empty(count)
        called(
            f"reduce-scatter above its limit, {name}",
            lambda: DirectReduceScatter(16)(around, whole[rank], group, dist.ReduceOp.SUM),  # noqa: B023
        )
        scattered = max(scattered, float((around - expected).abs().max()))
    reduced, equal = {}, {}
    for count in _REDUCED:
        terms = torch.stack([_part(20 + one, count, torch.float64) for one in range(_WORLD)])
        total = terms[rank].clone()
        called(f"all-reduce, {count}", lambda: all_ranks().all_reduce_small(total))  # noqa: B023
        reduced[count] = float((total - terms.sum(0)).abs().max())
        everywhere = [torch.empty_like(total) for _ in range(_WORLD)]
        dist.all_gather(everywhere, total)
        equal[count] = all(torch.equal(other, total) for other in everywhere)
    infinite = torch.tensor([float("inf") if rank == 1 else 0.0, 1.0])
    all_ranks().all_reduce_small(infinite)
    return {
        "gathered": gathered,
        "scattered": scattered,
        "reduced": reduced,
        "equal": equal,
        "calls": calls,
        "infinite": [str(value) for value in infinite.tolist()],
    }


if __name__ == "__main__":
    run_ranks(_WORLD, find)
