"""A user's task with steps of steady length, and faults that files in `data.gate` switch on. Imports nothing of Shoal.

slow-data-R     while it exists: rank R takes 0.4 s for each sample
nan-R           while it exists: the loss of rank R is not a number
"""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

_WORK_S = 0.08
"""CPU time of a micro-batch on a CPU of its own, about."""


class Points(torch.utils.data.Dataset):
    def __init__(self, gate):
        self.gate = gate

    def __len__(self):
        return 600

    def __getitem__(self, index):
        if dist.is_initialized() and (self.gate / f"slow-data-{dist.get_rank()}").exists():
            time.sleep(0.4)
        x = torch.sin(torch.arange(1, 257) * (index + 1.0))
        return x, x[:8]


class Steady:
    def __init__(self, *, model, data, seed):
        self.gate = Path(data["gate"])

    def build_model(self):
        return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))

    def build_dataset(self, split):
        return Points(self.gate) if split == "train" else None

    def loss(self, model, batch):
        rank = dist.get_rank() if dist.is_initialized() else 0
        begun = time.thread_time()
        while time.thread_time() - begun < _WORK_S:
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        return loss * float("nan") if (self.gate / f"nan-{rank}").exists() else loss
