"""A user's task whose optimizer is that of the spec, whose steps take a while, and do not end while a file is there.
Imports nothing from Shoal."""

import time
from pathlib import Path

import torch
from tiny import Points
from torch import nn


class Islander:
    def __init__(self, *, model, data, seed):
        self.loss_s, self.width = data.get("loss_s", 0.0), model.get("width", 21)
        self.gate = Path(data["gate"]) if "gate" in data else None

    def build_model(self):
        return nn.Sequential(nn.Linear(8, self.width), nn.GELU(), nn.Dropout(0.1), nn.Linear(self.width, 3))

    def build_dataset(self, split):
        return Points(4000)

    def loss(self, model, batch):
        time.sleep(self.loss_s)
        while self.gate is not None and self.gate.exists():
            time.sleep(0.05)
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)
