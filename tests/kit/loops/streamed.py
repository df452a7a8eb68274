"""A small regression on samples that are streamed: `streamed.py SETTINGS LEDGER NUM_WORKERS`.

SETTINGS is JSON: the arguments of StreamedShards, with record_bytes. Each rank verifies every byte of its samples and
notes their numbers in the directory LEDGER: a file for each step, generation and rank.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import shoal
from kit.processes.generated_shards import verified
from shoal_workers.data.streaming import FixedRecords, StreamedShards

GLOBAL_SIZE, MICRO_SIZE = 12, 3


def sample(record):
    number = verified(record)
    return number, torch.tensor([number * 0.1, number % 7]).sin()


def train(run):
    settings, ledger, num_workers = sys.argv[1:]
    settings = json.loads(settings)
    data = StreamedShards(kind=FixedRecords(settings.pop("record_bytes")), decode=sample, **settings)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    start = run.step
    for numbers, x in run.batches(data, global_size=GLOBAL_SIZE, micro_size=MICRO_SIZE, num_workers=int(num_workers)):
        note = Path(ledger, f"{run.step}.{start}.{run.rank}.{os.getpid()}")
        with note.open("a") as file:
            file.writelines(f"{number}\n" for number in numbers.tolist())
        run.backward((model(x).squeeze(1) - x.prod(1)).square().mean(), weight=len(x))
        run.steps(optimizer)


if __name__ == "__main__":
    shoal.run(train)
