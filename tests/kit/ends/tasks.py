"""A task that ends in its twelfth loss, as the variable END says."""

import ends
import torch
import torch.distributed as dist


class Task:
    def __init__(self, *, model, data, seed):
        self.calls = 0

    def build_model(self):
        return torch.nn.Linear(2, 1)

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(16, 2)) if split == "train" else None

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 12:
            ends.here(dist.get_rank())
        return model(batch[0]).square().mean()
