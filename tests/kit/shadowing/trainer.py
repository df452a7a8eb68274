"""A user's task next to the user's own packages `api`, `service` and `workers`."""

import sys

import service
import torch
import workers
from torch import nn

import api


class Task:
    def __init__(self, *, model, data, seed):
        for module in (api, service, workers, sys.modules["shoal_workers"]):
            print(f"{module.__name__} = {module.__file__}")

    def build_model(self):
        return nn.Linear(2, 1)

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(16, 2)) if split == "train" else None

    def loss(self, model, batch):
        return model(batch[0]).square().mean()
