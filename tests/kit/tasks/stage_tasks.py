"""A task as a user writes it, with models that are hard to split into stages (`model.kind`); nothing of Shoal in it."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Rich(nn.Module):
    """What a plan cannot say: two embeddings, arithmetic and modules between blocks that no list names, blocks that are
    left out at random, dropout, a mask from the tokens, noise, a dict as output."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(RichBlock() for _ in range(BLOCKS))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.3)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        x = self.dropout(x)
        mask = (tokens % 5 != 0).unsqueeze(-1)
        for index, block in enumerate(self.blocks):
            if self.training and random.random() < 0.3:
                continue
            x = block(x=x * 0.9, mask=mask)
            if index % 2:
                x = x + torch.tanh(self.between(x))
        x = self.norm(x)
        return {"logits": self.head(x + 0.1 * torch.rand(x.shape)), "last": x}


class RichBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x, mask):
        return x + self.dropout(F.gelu(self.linear(self.norm(x)))) * mask


class Difficult(Model):
    """Models that no pipeline can run as they are, and a few that it can."""

    def __init__(self, kind):
        super().__init__(kind)
        match kind:
            case "frozen_stage":
                for module in (self.embedding, *self.blocks[:2]):
                    module.requires_grad_(False)
            case "frozen_last":
                for module in (*self.blocks[2:], self.norm, self.head):
                    module.requires_grad_(False)
            case "odd_width":
                self.blocks[1].forward = lambda x: x[:, 1:]
            case "two_values":
                for block in self.blocks:
                    block.forward = lambda x, own=block.forward: (own(x[0] if isinstance(x, tuple) else x), None)

    def forward(self, tokens, scale=1.0):
        x = embedded = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            match self.kind:
                case "skip_argument" if index == 3:
                    x = _with_skip(block, x, embedded)
                case "checkpointed":
                    x = checkpoint(block, x, use_reentrant=False)
                case "reentrant":
                    x = checkpoint(block, x, use_reentrant=True)
                case _:
                    x = block(x)
            if self.kind == "skip_between" and index == 2:
                x = x + embedded
        if self.kind == "again":
            x = self.blocks[0](x)
        if self.kind == "two_values":
            x = x[0]
        if self.kind == "own_head":
            return F.linear(self.norm(x), self.embedding.weight)
        return self.head(self.norm(x)) * scale


def _with_skip(block, x, embedded):
    own = block.forward
    block.forward = lambda x, skip: own(x + skip)
    try:
        return block(x, embedded)
    finally:
        block.forward = own


class Staged:
    def __init__(self, model, data, seed):
        self.kind = model["kind"]

    def build_model(self):
        return Rich() if self.kind == "rich" else Difficult(self.kind)

    def build_dataset(self, split):
        return Sequences(64 if split == "train" else 7)

    def loss(self, model, batch):
        tokens, labels = batch[:, :-1], batch[:, 1:].flatten()
        match self.kind:
            case "rich":
                return self._rich_loss(model, tokens, labels)
            case "twice":
                logits = model(tokens) + model(tokens.flip(0)).flip(0)
            case "never":
                return F.cross_entropy(torch.zeros(labels.numel(), VOCABULARY, requires_grad=True), labels)
            case "penalty":
                logits = model(tokens)
                return F.cross_entropy(logits.flatten(0, 1), labels) + sum(p.square().sum() for p in model.parameters())
            case "input_gradient":
                logits = model(tokens, torch.ones((), requires_grad=True))
            case "no_tensor":
                logits = model({"tokens": tokens})
            case "two_shapes":
                logits = model(tokens[:, : LENGTH - int(batch[0, 0]) % 2])
                labels = batch[:, 1 : logits.shape[1] + 1].flatten()
            case _:
                logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels)

    def _rich_loss(self, model, tokens, labels):
        """Draws from every generator, before the call of the model and after it."""
        is_masked = torch.rand(tokens.shape) < 0.2
        shift = random.randrange(3) + int(np.random.randint(3))
        output = model(torch.where(is_masked, (tokens + shift) % VOCABULARY, tokens))
        noise = 0.1 * torch.randn(output["logits"].shape) + 0.1 * random.gauss(0, 1) + 0.1 * np.random.randn()
        loss = F.cross_entropy((output["logits"] + noise).flatten(0, 1), labels)
        return loss + 0.01 * output["last"].square().mean(), {"noise": noise.mean()}
