"""A task over shards of other libraries, as a user writes it; of Shoal it uses the data set only."""

import torch
import torch.nn.functional as F
from torch import nn

from shoal_workers.data.sharded_files import ShardedFiles


def decode(sample):
    """Makes of a sample of the fixtures of MDS six numbers, and one to find."""
    return torch.from_numpy(sample["array"]).float().flatten() / 10, torch.tensor([sample["number"] / 10])


class Numbers:
    def __init__(self, model, data, seed):
        self.data = data

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def build_dataset(self, split):
        return ShardedFiles(self.data["shards"], decode=self.data.get("decode", decode))

    def loss(self, model, batch):
        inputs, wanted = batch
        return F.mse_loss(model(inputs), wanted)
