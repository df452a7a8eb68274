"""Tasks with alternating updates: each optimizer has parameters and a loss of its own."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn


class Points(torch.utils.data.Dataset):
    """A point of a ring, and noise to make another one of."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        angle = 6.28 * torch.rand((), generator=generator)
        return torch.stack([angle.cos(), angle.sin()]), torch.randn(3, generator=generator)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.judge = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def forward(self, noise=None, points=None):
        if noise is not None:
            points = self.maker(noise)
        return points, self.judge(points)


class Gan:
    optimizers: ClassVar = {"d": "judge.*", "g": ["maker.*"]}

    def __init__(self, model, data, seed):
        if "updates" in model:
            self.updates = model["updates"]

    def build_model(self):
        return Pair()

    def build_dataset(self, split):
        return Points()

    def loss(self, model, batch):
        _, scores = model(noise=batch[1])
        return F.softplus(-scores).mean()

    def training_step(self, model, batch, optimizers):
        points, noise = batch

        def judges():
            with torch.no_grad():
                made, _ = model(noise=noise)
            real, fake = model(points=points)[1], model(points=made)[1]
            correct = ((real > 0).float().mean() + (fake < 0).float().mean()) / 2
            return F.softplus(-real).mean() + F.softplus(fake).mean(), {"correct": correct}

        def makes():
            loss = F.softplus(-model(noise=noise)[1])
            # every third update counts twice: what a task may know of its optimizers is a function of the step
            factor = 2.0 if optimizers["g"].num_updates % 3 == 2 else 1.0
            return factor * loss.sum(), len(loss)

        assert sum(one.is_updated for one in optimizers.values()) == 1
        return {"d": judges, "g": makes}


class NoOptimizers(Gan):
    optimizers = None


class Unowned(Gan):
    optimizers: ClassVar = {"d": "judge.*", "g": "maker.0.*"}


class OwnedTwice(Gan):
    optimizers: ClassVar = {"d": "judge.*", "g": ["maker.*", "judge.2.*"]}


class NoSuchName(Gan):
    optimizers: ClassVar = {"d": "critic.*", "g": "*"}


class OneLoss(Gan):
    def training_step(self, model, batch, optimizers):
        return self.loss(model, batch)


class OtherLoss(Gan):
    def training_step(self, model, batch, optimizers):
        return {"g": self.loss(model, batch)}


class LeftOut(Gan):
    updates = ("d",)
