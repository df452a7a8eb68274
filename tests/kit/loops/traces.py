"""A loop that leaves traces: `traces.py HOW DIRECTORY`.

anyone, guarded    every process writes a file; the one that run.is_rank_zero names
posts              every process posts to the port in the file `port`
reads ahead        with a process that reads
waits              the same, and trials do not end
large              more parameters than are tried
other              a trial ends its process
"""

import os
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import shoal

HOW, DIRECTORY = sys.argv[1], Path(sys.argv[2])
WORKER = os.getpid()


class Points:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index * 0.3, index % 5]).sin()


def train(run):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    if HOW == "large":
        model.table = nn.Parameter(torch.zeros(50_000_001, dtype=torch.int8), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    workers = 1 if HOW in ("reads ahead", "waits") else 0
    for x in run.batches(Points(), global_size=8, micro_size=2, num_workers=workers):
        if run.step == 4:
            return
        if HOW == "anyone" or (HOW == "guarded" and run.is_rank_zero):
            (DIRECTORY / str(os.getpid())).write_text(str(run.step))
        if HOW == "posts":
            with suppress(OSError):  # as who sends a message that may be lost
                urllib.request.urlopen(f"http://127.0.0.1:{(DIRECTORY / 'port').read_text()}", str(run.step).encode())
        if HOW == "waits" and os.getpid() != WORKER:
            time.sleep(600)
        if HOW == "other" and os.getpid() != WORKER:
            os._exit(3)
        run.backward((model(x) - 1).square().mean(), weight=len(x))
        run.steps(optimizer)


if __name__ == "__main__":
    shoal.run(train)
