"""Small models of the kinds in which an engine could wait for a GPU: in a micro-batch, in a step, in an update.

They import nothing from Shoal.
"""

import torch
from torch import nn
from torch.nn import functional as F

DIM, CLASSES = 16, 4


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(3, 8, 8, generator=generator), "y": torch.tensor(index % CLASSES)}


class Plain(nn.Module):
    """A table that no forward pass changes and that is no state, as the frequencies of rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(192, DIM), nn.Linear(DIM, CLASSES)
        self.register_buffer("inv_freq", 1.0 / 10_000 ** (torch.arange(DIM) / DIM), persistent=False)

    def forward(self, x):
        return self.last(F.gelu(self.first(x.flatten(1))) * self.inv_freq.cos())


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        return self.last(x.mean((2, 3)))


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it, and a small table."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(192, DIM), nn.Linear(192, 2, bias=False), nn.Linear(2, DIM)
        self.frozen, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)
        for module in (self.base, self.frozen):
            module.requires_grad_(False)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        x = x.flatten(1)
        return self.last(self.frozen(F.gelu(self.base(x) + self.scale * self.up(self.down(x)))))


KINDS = {"plain": Plain, "batchnorm": Normed, "adapters": Adapted}


class Waiting:
    def __init__(self, model, data, seed):
        self.kind = model["kind"]

    def build_model(self):
        return KINDS[self.kind]()

    def build_dataset(self, split):
        return Samples()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])
