"""Collectives of small tensors over gloo: around the ring, which is torch's way, and directly to every rank.

    python bench/group/direct_collectives.py [--ranks 4,16,32] [--sizes 600,16384] [--rounds 6]

Each world is a set of forked processes. A size is the number of fp32 elements of a rank's part; the all-reduce is as
large as a vote. Milliseconds of a call, and CPU milliseconds of all ranks together.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.group.direct_collectives import DirectAllGather, DirectReduceScatter
from shoal_workers.engine.group.network_interface import choose_interface

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,16,32", help="numbers of ranks (4,16,32)")
    parser.add_argument("--sizes", default="600,16384", help="elements of a rank's part (600,16384)")
    parser.add_argument("--rounds", type=int, default=6, help="calls of each collective (6)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    choose_interface(_HOST, 1)
    print("| ranks | elements | collective | ring, ms | ring, CPU ms | direct, ms | direct, CPU ms |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for world in map(int, arguments.ranks.split(",")):
        for size in map(int, arguments.sizes.split(",")):
            _measure(world, size, arguments.rounds)


def _measure(world: int, size: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-collectives-") as folder:
        ranks = []
        for rank in range(world):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    _run(rank, world, size, rounds, Path(folder) / "store")
                    code = 0
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            ranks.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
        assert not any(statuses), "a rank has failed"


def _run(rank: int, world: int, size: int, rounds: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    part, whole = torch.ones(size), torch.ones(world * size)
    vote = torch.ones(10 * world + 15, dtype=torch.float64)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all-gather": (
            lambda: DefaultAllGather()(whole, part, group),
            lambda: DirectAllGather()(whole, part, group),
        ),
        "reduce-scatter": (
            lambda: DefaultReduceScatter()(part, whole, group, dist.ReduceOp.SUM),
            lambda: DirectReduceScatter()(part, whole, group, dist.ReduceOp.SUM),
        ),
        "all-reduce": (lambda: dist.all_reduce(vote), lambda: all_ranks().all_reduce_small(vote)),
    }
    for name, pair in pairs.items():
        figures = [figure for way in pair for figure in _timed(way, rounds)]
        if rank == 0:
            elements = len(vote) if name == "all-reduce" else size
            print(f"| {world} | {elements} | {name} | " + " | ".join(f"{one:.1f}" for one in figures) + " |")
    dist.barrier()


def _timed(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Times a call: milliseconds, and CPU milliseconds of all ranks."""
    call()
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        call()
    spent = torch.tensor([time.process_time() - cpu])
    wall = time.perf_counter() - start
    dist.all_reduce(spent)
    return 1000 * wall / rounds, 1000 * float(spent) / rounds


if __name__ == "__main__":
    main()
