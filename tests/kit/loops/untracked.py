"""A right loop, and what each wrong one forgets: `untracked.py MISTAKE`."""

import itertools
import random
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

MISTAKE = sys.argv[1] if len(sys.argv) > 1 else "none"
DATASET = TensorDataset(torch.linspace(-1, 1, 48).reshape(24, 2))
steps_made = 0


class Average:
    """A moving average of the parameters, and with `is_forgetful` one that does not take its state back."""

    def __init__(self, model, is_forgetful):
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.is_forgetful = is_forgetful

    def add(self, model):
        for name, value in model.named_parameters():
            self.values[name].lerp_(value.detach(), 0.5)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        if not self.is_forgetful:
            self.values = state["values"]


def train(run):
    global steps_made
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    average = Average(model, MISTAKE == "forgetful")
    tracked = {"model": model, "optimizer": optimizer}
    if MISTAKE != "average":
        tracked["average"] = average
    run.track(**tracked)
    noise = torch.Generator().manual_seed(1)
    positions = itertools.cycle(DataLoader(DATASET, batch_size=4))
    started = random.SystemRandom().random()  # as a time would be
    printed = 0
    for (x,) in run.batches(DATASET, global_size=12, micro_size=4):
        while MISTAKE == "slow":
            pass
        if MISTAKE == "counter":
            optimizer.param_groups[0]["lr"] = 0.05 * 0.5**steps_made
        if MISTAKE == "generator":
            x = x + 0.1 * torch.randn(x.shape, generator=noise)
        if MISTAKE == "iterator":
            [x] = next(positions)
        if MISTAKE == "unseeded":
            x = x + started
        run.backward((model(x) - 1).square().mean(), weight=len(x))
        if run.steps(optimizer):
            average.add(model)
            steps_made += MISTAKE == "counter"
            printed += 1
            if MISTAKE == "short" and run.step == 2:
                return
            if MISTAKE == "failing" and run.step == 3:
                raise ValueError("the third step is not for me")


shoal.run(train)
