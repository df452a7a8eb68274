"""What examples/gallery/lightning-in-place trains, as a loop without Lightning."""

import sys

import torch
from torch import nn

STEPS = int(sys.argv[1])


def train(run):
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    data = torch.utils.data.TensorDataset(x, x.pow(2).sum(1, keepdim=True).sqrt())
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in run.global_batches(data, global_size=32, micro_size=8):
        if run.step == STEPS:
            return
        for a, b in step:
            run.backward(nn.functional.mse_loss(model(a), b), weight=len(a))
        run.update(optimizer, clip=1.0)
        schedule.step()
        run.commit()
