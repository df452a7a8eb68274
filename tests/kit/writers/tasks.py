"""A task that leaves its mark when it is made: `model: {mark: MARK, gates: GATES}`."""

import mine
import torch
from torch import nn


class Task:
    def __init__(self, *, model, data, seed):
        mine.leave(model["mark"], model["gates"])

    def build_model(self):
        return nn.Linear(2, 1)

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(16, 2)) if split == "train" else None

    def loss(self, model, batch):
        return model(batch[0]).square().mean()
