"""A task as a user writes it, with models that are hard to split into stages (`model.kind`); nothing of Shoal in it."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH, WIDTH, BLOCKS = 37, 8, 12, 4

PLAN = {
    "blocks": "blocks",
    "num_blocks": BLOCKS,
    "first": ["embedding"],
    "last": ["norm", "head"],
    "hidden_size": WIDTH,
}


class Sequences(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return (torch.arange(LENGTH + 1) * (index % 3 + 1) + index) % VOCABULARY


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if kind == "square":
            self.up = nn.Linear(WIDTH, WIDTH)
            self.down = nn.Linear(WIDTH, WIDTH)
            self.down.weight = self.up.weight
        self.register_buffer("gain", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.gain


class Model(nn.Module):
    """Embedding, blocks, norm, head, and what `kind` changes."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.3)
        match kind:
            case "ends":
                self.head.weight = self.embedding.weight
            case "inside":
                self.blocks[1].up.weight = self.blocks[0].up.weight
            case "middle":
                self.blocks[2].up.weight = self.blocks[1].up.weight
                self.blocks[2].gain = self.blocks[1].gain
            case "all":
                for block in self.blocks[1:]:
                    block.up.weight = self.blocks[0].up.weight
                self.head.weight = self.embedding.weight
            case "frozen":
                self.head.weight = self.embedding.weight
                self.embedding.requires_grad_(False)
            case "same_block":
                self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1]] * 2)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Staged:
    def __init__(self, model, data, seed):
        self.kind = model["kind"]

    def build_model(self):
        return Model(self.kind)

    def build_dataset(self, split):
        return Sequences(64 if split == "train" else 7)

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
