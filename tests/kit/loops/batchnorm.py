"""A small CNN with BatchNorm, a moving average and a counter of its own as buffers. Logs what they are."""

import torch
import torch.distributed as dist
from torch import nn

import shoal

STEPS, GLOBAL_SIZE = 8, 12


class Images:
    """Noise, and whether its left half is brighter."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(40, 1, 6, 6, generator=generator)
        self.y = (self.x[..., :3].mean(dim=(1, 2, 3)) > self.x[..., 3:].mean(dim=(1, 2, 3))).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.other, self.average = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None)
        self.last = nn.Linear(16, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        self.count += len(x)
        hidden = self.norm(self.conv(x)).relu() + self.table.view(1, 4, 1, 1)
        return self.last(self.average(self.other(hidden)).relu().flatten(1))


def train(run):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for batch in run.global_batches(Images(), global_size=GLOBAL_SIZE, micro_size=3):
        if run.step == STEPS:
            return
        for x, y in batch:
            run.backward(nn.functional.cross_entropy(model(x), y), weight=len(x))
        run.update(optimizer, clip=1.0)
        log(run, model)
        run.commit()


def log(run, model):
    """Each buffer as one number, and the largest difference to those of rank 0."""
    flat = torch.cat([buffer.double().reshape(-1) for buffer in model.buffers()])
    first = flat.clone()
    if run.world_size > 1:
        dist.broadcast(first, 0)
    spread = (flat - first).abs().max()
    if run.world_size > 1:
        dist.all_reduce(spread, op=dist.ReduceOp.MAX)
    numbers = {name.replace(".", "_"): float(value.double().square().sum()) for name, value in model.named_buffers()}
    run.log(spread=float(spread), **numbers)


if __name__ == "__main__":
    shoal.run(train)
