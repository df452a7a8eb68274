"""A stream without an end and without a length: which sample is next is a part of the state, so each is read once.

    shoal submit train.py --workers 1:4 --follow -- 300          also: python train.py, torchrun ... train.py

Four streams at every number of workers; a worker reads those that are its own. What a stream's state_dict() returns is
kept with the model.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300


class Digits(IterableDataset):
    """Four digits, and which of them is the largest. Every `num_streams`-th number from `stream` on."""

    def __init__(self, stream, num_streams):
        self.next, self.num_streams = stream, num_streams

    def __iter__(self):
        while True:
            random = torch.Generator().manual_seed(self.next)
            self.next += self.num_streams
            digits = torch.randperm(10, generator=random)[:4]
            yield nn.functional.one_hot(digits, 10).flatten().float(), digits.argmax()

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def train(run):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 4)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    streams = run.batches(
        lambda stream, num_streams: DataLoader(Digits(stream, num_streams), batch_size=8), global_size=32, num_streams=4
    )
    for digits, largest in streams:
        if run.step == STEPS:
            return
        scores = model(digits)
        run.backward(nn.functional.cross_entropy(scores, largest), weight=len(largest))
        if run.steps(optimizer):
            run.log(accuracy=(scores.argmax(dim=1) == largest).float().mean())


if __name__ == "__main__":
    shoal.run(train)
