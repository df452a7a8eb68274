"""Two ranks; rank 1 takes part in no collective. Rank 0 waits in each of them and wants to leave at the first chance.

Prints one line for each collective: its name, and "left" or the error with which the wait ended.
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

from shoal_workers.engine.group.collectives import interruptible_waits, replace_wait

_TIMEOUT = timedelta(seconds=5)


class Left(Exception):
    pass


def leave():
    raise Left


def collectives(group):
    whole, half = torch.ones(8), torch.ones(4)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather([torch.zeros(8), torch.zeros(8)], whole, group=group),
        "all_gather_single": lambda: dist.all_gather_single(torch.zeros(16), whole, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(half, [torch.ones(4), torch.ones(4)], group=group),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(half, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, 1, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(8), whole, group=group),
        "recv": lambda: dist.recv(whole, 1, group=group),
    }


def main():
    directory = tempfile.mkdtemp()
    is_done, done = os.pipe()
    rank = 1 if os.fork() == 0 else 0
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2, timeout=_TIMEOUT)
    names = list(collectives(None))
    groups = [dist.new_group([0, 1], timeout=_TIMEOUT) for _ in names]
    if rank == 1:
        os.close(done)
        os.read(is_done, 1)  # until rank 0 has ended
        os._exit(0)
    replace_wait()
    for name, group in zip(names, groups, strict=True):
        try:
            with interruptible_waits(leave):
                collectives(group)[name]()
            print(name, "completed")
        except Left:
            print(name, "left")
        except RuntimeError as error:
            print(name, error)
    sys.stdout.flush()
    os._exit(0)


main()
