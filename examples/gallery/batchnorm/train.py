"""A convolutional network with BatchNorm: its running statistics change in the forward pass.

    shoal submit train.py --workers 1:4 --follow -- 300          also: python train.py, torchrun ... train.py

The forward pass normalises each micro-batch by itself, so with a fixed micro_size the losses are the same at every
number of workers.
"""

import sys

import torch
from torch import nn

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300


class Stripes:
    """Small pictures with stripes across or down, under noise."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        kind, shift = index % 2, int(torch.randint(4, (), generator=random))
        stripes = torch.zeros(8, 8)
        stripes[shift::4] = 1.0
        picture = stripes.T if kind else stripes
        return (picture + 0.5 * torch.randn(8, 8, generator=random))[None], kind


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


def train(run):
    torch.manual_seed(6)
    model = nn.Sequential(block(1, 8), block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    model.to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    for pictures, kinds in run.batches(Stripes(), global_size=32, micro_size=8):
        if run.step == STEPS:
            return
        scores = model(pictures)
        run.backward(nn.functional.cross_entropy(scores, kinds), weight=len(kinds))
        if run.steps(optimizer):
            schedule.step()
            run.log(accuracy=(scores.argmax(dim=1) == kinds).float().mean())


if __name__ == "__main__":
    shoal.run(train)
