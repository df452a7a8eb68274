"""A loop that leaves its mark: `loop.py MARK GATES`."""

import sys

import mine
import torch
from torch import nn

import shoal


def train(run):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    for (x,) in run.batches(data, global_size=4, micro_size=4):
        if run.step == 1:
            return
        mine.leave(*sys.argv[1:])
        run.backward(model(x).square().mean(), weight=len(x))
        run.steps(optimizer)


shoal.run(train)
