"""A step of a loop beside a step of the same training in DistributedDataParallel, in turns in the same processes.

    torchrun --nproc-per-node 3 bench/programs/paired.py [MICRO_BATCH] [TURNS] [GLOBAL_BATCH]

A step is as long as its global batch is large; both parts read and collate their samples in the same way.

Other work on the machine slows both alike, so their ratio is known better than either. Rank 0 prints medians over the
turns, also of the CPU time, and the ratio of each turn's two.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import GLOBAL_BATCH, MICRO_BATCH, Samples, model

import shoal

_STEPS = 5
"""Steps of each kind in a turn."""
_WARM_UP = 2
"""Turns."""


def train(run: Any) -> None:
    micro = int(sys.argv[1]) if len(sys.argv) > 1 else MICRO_BATCH
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 24
    network, other, samples = model(), model(), Samples()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    run.track(network=network, optimizer=optimizer)
    wrapped = DistributedDataParallel(other)
    of_other = torch.optim.AdamW(other.parameters(), lr=1e-4)
    global_batch = int(sys.argv[3]) if len(sys.argv) > 3 else GLOBAL_BATCH
    num_micro_batches = global_batch // micro // run.world_size

    def step_in_ddp(step: int) -> None:
        for number in range(num_micro_batches):
            first = step * global_batch + (run.rank * num_micro_batches + number) * micro
            x, y = _batch([samples[at % len(samples)] for at in range(first, first + micro)])
            is_last = number == num_micro_batches - 1
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                (nn.functional.cross_entropy(wrapped(x), y) / num_micro_batches).backward()
        of_other.step()
        of_other.zero_grad()

    found: list[tuple[float, ...]] = []
    start = _now()
    for x, y in run.batches(samples, global_size=global_batch, micro_size=micro, collate=_batch):
        run.backward(nn.functional.cross_entropy(network(x), y), weight=len(x))
        if not run.steps(optimizer) or run.step % _STEPS:
            continue
        between = _now()
        for step in range(run.step - _STEPS, run.step):
            step_in_ddp(step)
        end = _now()
        differences = [
            (b - a) / _STEPS * 1000 for a, b in (*zip(start, between, strict=True), *zip(between, end, strict=True))
        ]
        found.append(tuple(differences))
        start = _now()
        if len(found) == turns:
            break
    if run.is_rank_zero:
        _print(found[_WARM_UP:])


def _batch(items: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.stack(parts) for parts in zip(*items, strict=True))


def _now() -> tuple[float, float]:
    """Wall-clock and CPU seconds, once all ranks are here."""
    dist.barrier()
    use = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), use.ru_utime + use.ru_stime


def _print(found: list[tuple[float, ...]]) -> None:
    loop, loop_cpu, ddp, ddp_cpu = (statistics.median(column) for column in zip(*found, strict=True))
    ratio, cpu_ratio = (statistics.median(one[at] / one[at + 2] for one in found) for at in (0, 1))
    print(
        f"loop {loop:.1f} ms, DDP {ddp:.1f} ms, ratio {ratio:.3f}; CPU of rank 0: {loop_cpu:.1f} ms, {ddp_cpu:.1f} ms, "
        f"ratio {cpu_ratio:.3f}"
    )


shoal.run(train)
