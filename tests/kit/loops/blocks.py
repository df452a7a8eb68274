"""A network of blocks whose gradients are clipped, with an average of its parameters; sharded as its second argument
says: by `run.wrap`, or by hand. It stands still after step 6 until the file that the third one names exists."""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import shoal

STEPS, GATED, GLOBAL_SIZE, WIDTH = 8, 6, 12, 10


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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.narrow(torch.tanh(self.wide(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 2)
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.num_passes += 1
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


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


def sharded(model, how, run):
    if how == "wrap":
        return run.wrap(model)
    if how == "blocks":
        return run.wrap(model, blocks=list(model.blocks)[:2])
    if how == "hand":
        for block in model.blocks:
            fully_shard(block, mesh=run.mesh)
        fully_shard(model, mesh=run.mesh)
    return model


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(run):
    how = sys.argv[2] if len(sys.argv) > 2 else "wrap"
    torch.manual_seed(0)
    model = sharded(Net(), how, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    average = Average(model)
    run.track(model=model, optimizer=optimizer, schedule=schedule, average=average)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    if run.step >= steps:
        return
    for x, y in run.batches(Points(), global_size=GLOBAL_SIZE, micro_size=3):
        while run.step == GATED and len(sys.argv) > 3 and not Path(sys.argv[3]).exists():
            time.sleep(0.02)
        run.backward(nn.functional.cross_entropy(model(x), y), weight=len(x))
        if run.steps(optimizer, clip=0.5):
            schedule.step()
            average.add(model)
            values = [whole(value) for value in average.values.values()]
            parts = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
            run.log(average=sum(float(v.sum()) for v in values), passes=model.num_passes, parts=parts)
            if run.step == steps:
                return


if __name__ == "__main__":
    shoal.run(train)
