"""For the programs of this folder: forks the ranks of one gloo group from a process that has imported torch.

A program calls `run_ranks` with a function of (rank, *arguments). Its result on rank 0 is the program's answer,
which the fixture `answer_of` reads. An answer is a file: gloo writes to standard output from every rank, also into
the middle of a line.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(world: int, find: Callable[..., Any]) -> None:
    """Call `find(rank, *arguments)` on every rank; exits with the number of ranks that failed."""
    store_file, *arguments = sys.argv[1:]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run, args=(rank, world, store_file, find, arguments)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(sum(rank.exitcode != 0 for rank in ranks))


def largest(cases: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Every case's largest value on any rank; all ranks have the same cases."""
    names, values = zip(*cases, strict=True)
    everywhere = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    return dict(zip(names, everywhere.tolist(), strict=True))


def write_answer(store_file: str, answer: Any) -> None:
    """`answer_of` has chosen the file with that of the group's store, argv[1] of every program."""
    Path(f"{store_file}.answer").write_text(json.dumps(answer), encoding="utf-8")


def _run(rank: int, world: int, store_file: str, find: Callable[..., Any], arguments: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=world)
    answer = find(rank, *arguments)
    if rank == 0:
        write_answer(store_file, answer)
    dist.barrier()
    dist.destroy_process_group()
