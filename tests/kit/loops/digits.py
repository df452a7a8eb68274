"""A classifier with dropout, momentum, a schedule and a moving average: as many kinds of state as fit on one screen."""

import sys

import torch
from torch import nn

import shoal

STEPS, GLOBAL_SIZE = 8, 12


class Points:
    """Points on the plane, and on which side of a circle they are."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(40, 2, generator=generator)
        self.y = (self.x.norm(dim=1) > 1).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Average:
    """A moving average of a model's parameters."""

    def __init__(self, model):
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.count = 0

    def add(self, model):
        self.count += 1
        for name, value in model.named_parameters():
            self.values[name].lerp_(value.detach(), 0.1)

    def state_dict(self):
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state):
        self.values, self.count = state["values"], state["count"]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), Average(model)


def train(run):
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    model, optimizer, schedule, average = build()
    run.track(model=model, optimizer=optimizer, schedule=schedule, average=average)
    model.train()
    if run.step >= steps:
        return
    for x, y in run.batches(Points(), global_size=GLOBAL_SIZE, micro_size=3):
        run.backward(nn.functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer, clip=1.0):
            schedule.step()
            average.add(model)
            run.log(average=sum(float(value.sum()) for value in average.values.values()))
            if run.step == steps:
                return


if __name__ == "__main__":
    shoal.run(train)
