"""A task that ends after its eighth step, as the variable END says, and again when it goes on from there.

A task does not know its step. The sum of its two weights is 2 * 0.96 ** step, and the loss is its square.
"""

import ends
import torch
import torch.distributed as dist


class Task:
    def __init__(self, *, model, data, seed):
        pass

    def build_model(self):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        return model

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.ones(16, 2)) if split == "train" else None

    def loss(self, model, batch):
        loss = model(batch[0]).square().mean()
        if loss < 4 * 0.96 ** (2 * 7.5):
            ends.here(dist.get_rank())
        return loss
