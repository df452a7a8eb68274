"""A residual network (He et al. 2015) with BatchNorm: its running statistics change in the forward pass.

    shoal submit train.py --workers 1:4 --follow -- 300          also: python train.py, torchrun ... train.py

The forward pass normalises each micro-batch by itself, so with a fixed micro_size the losses are the same at every
number of workers.
"""

import itertools
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


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.shortcut = nn.Identity() if (before, stride) == (after, 1) else shortcut

    def forward(self, x):
        return torch.relu(self.inner(x) + self.shortcut(x))


def resnet(widths, num_kinds):
    layers = [nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    for before, after in itertools.pairwise(widths):
        layers += [Residual(before, after, stride=2), Residual(after, after, stride=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_kinds))


def train(run):
    torch.manual_seed(6)
    model = resnet([8, 8, 16], num_kinds=2).to(run.device)
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
