"""A loop of your own that Shoal runs in place: two lines at the end, and what the state is.

python train.py                                       alone
torchrun --nproc-per-node 2 train.py                  without a service
shoal submit train.py --workers 1:4 --follow          elastic: a lost worker costs one step at most
"""

import torch
from torch import nn

import shoal

STEPS = 200


class Rings:
    """Points of the plane, and on which of three rings each is."""

    def __init__(self):
        random = torch.Generator().manual_seed(0)
        self.rings = torch.randint(3, (4096,), generator=random)
        angles = 2 * torch.pi * torch.rand(4096, generator=random)
        radii = self.rings + 1 + 0.2 * torch.randn(4096, generator=random)
        self.points = radii[:, None] * torch.stack([angles.cos(), angles.sin()], dim=1)

    def __len__(self):
        return len(self.rings)

    def __getitem__(self, index):
        return self.points[index], self.rings[index]


def train(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    for points, rings in run.batches(Rings(), global_size=64, micro_size=8):
        if run.step == STEPS:
            break
        scores = model(points)
        run.backward(nn.functional.cross_entropy(scores, rings), weight=len(rings))
        if run.steps(optimizer, clip=1.0):
            schedule.step()
            run.log(accuracy=(scores.argmax(dim=1) == rings).float().mean())


shoal.run(train)
