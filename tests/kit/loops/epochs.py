"""A program with epochs, an evaluation and a schedule after each, and early stopping: with Shoal, and as it was before.

    epochs.py KIND [GATE]         KIND: usual, normed (with BatchNorm), early (it stops after the third epoch) or
                                  scheduled_first (the schedule is stepped at the beginning of an epoch)
    epochs.py KIND --plain        prints the losses and the final state of the program without Shoal

It stands still after step 7, the first one of the third epoch, until the file GATE exists."""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Sampler

import shoal

KIND = sys.argv[1] if len(sys.argv) > 1 else "usual"
NUM_EPOCHS, SAMPLES, GATED = 4, 22, 7


class Points(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Turned(Sampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter([(5 * index + 3 * self.epoch) % SAMPLES for index in range(SAMPLES)])


class Best:
    """Counts epochs that were not better than the best one."""

    def __init__(self):
        self.loss, self.patience, self.num_epochs = 1e9, 0, 0

    def is_enough(self, loss):
        self.patience = 0 if loss < self.loss else self.patience + 1
        self.loss = min(self.loss, loss)
        self.num_epochs += 1
        return self.patience == 3 or (KIND == "early" and self.num_epochs == 3)

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def build():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(12) if KIND == "normed" else nn.LayerNorm(12)
    model = nn.Sequential(nn.Linear(6, 12), norm, nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader = DataLoader(Points(), batch_size=8, sampler=Turned())
    return model, optimizer, schedule, Best(), loader


@torch.no_grad()
def evaluated(model):
    model.eval()
    x, y = Points()[:5]
    loss = float(cross_entropy(model(x), y))
    model.train()
    return loss


def train(run):
    model, optimizer, schedule, best, loader = build()
    run.track(model=model, optimizer=optimizer, schedule=schedule, best=best)
    for epoch in run.epochs(NUM_EPOCHS):
        if KIND == "scheduled_first":
            schedule.step()
        for x, y in run.batches(loader):
            while run.step == GATED and len(sys.argv) > 2 and not Path(sys.argv[2]).exists():
                time.sleep(0.02)
            loss = cross_entropy(model(x), y)
            run.backward(loss)
            run.steps(optimizer)
        loss = evaluated(model)
        schedule.step()
        run.log(evaluated=loss, epoch=epoch)
        if best.is_enough(loss):
            break


def plain():
    model, optimizer, schedule, best, loader = build()
    losses = []
    for epoch in range(NUM_EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        loss = evaluated(model)
        schedule.step()
        if best.is_enough(loss):
            break
    state = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    print(json.dumps({"losses": losses, "model": state, "best": best.state_dict()}))


if __name__ == "__main__":
    plain() if "--plain" in sys.argv else shoal.run(train)
