"""A regression on streamed samples, as a user writes it. `data`: the arguments of StreamedShards, and record_bytes."""

import torch
from torch import nn

from kit.processes.generated_shards import verified
from shoal_workers.data.streaming import FixedRecords, StreamedShards


def sample(record):
    number = verified(record)
    return torch.tensor([number * 0.1, number % 7]).sin()


class Streamed:
    def __init__(self, *, model, data, seed):
        self.data = dict(data)

    def build_model(self):
        return nn.Linear(2, 1)

    def build_dataset(self, split):
        if split != "train":
            return None
        kind = FixedRecords(self.data.pop("record_bytes"))
        return StreamedShards(kind=kind, decode=sample, **self.data)

    def loss(self, model, batch):
        return (model(batch).squeeze(1) - batch.prod(1)).square().mean()
