"""Tasks whose forward pass changes buffers; they import nothing from Shoal."""

import torch
from tiny_tasks import Block, Counting
from torch import nn
from torch.nn import functional as F


class Centred(nn.Module):
    """Subtracts a moving average of what it is called with, and counts; the average is put in place of the old one."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("average", torch.zeros(dim))
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_used", torch.tensor(False))

    def forward(self, x):
        centred = x - self.average
        if self.training:
            self.average = 0.8 * self.average + 0.2 * x.detach().mean((0, 1))
            self.tokens += x.shape[0] * x.shape[1]
            self.is_used.fill_(True)
        return centred


class Statistics(nn.Module):
    """Two kinds of BatchNorm; the first runs twice in each pass."""

    def __init__(self, dim):
        super().__init__()
        self.usual = nn.BatchNorm1d(dim)
        self.cumulative = nn.BatchNorm1d(dim, momentum=None)

    def forward(self, x):
        x = x + self._along(self.usual, x)
        x = x + self._along(self.cumulative, x)
        return x + self._along(self.usual, x.cos())

    @staticmethod
    def _along(norm, x):
        return norm(x.transpose(1, 2)).transpose(1, 2)


class Rare(nn.Module):
    """Keeps something of one sample only, which is drawn late."""

    def __init__(self, vocab, size):
        super().__init__()
        self.vocab = vocab
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x, tokens):
        if self.training and bool((tokens[:, 0] == 7).any()):
            self.seen.data[5] += 1.0
        return x + self.seen[5]


SIZES = (0, 1, (64 << 8) - 1, 64 << 8, (64 << 8) + 1, 40000)
"""Elements of four bytes: none, one, just below 64 KiB, 64 KiB, just above, far above."""
WAYS = ("in_place", "slice", "copy", "data", "data_slice", "data_assigned", "replaced")


class Sized(nn.Module):
    """A buffer of each size that is written in each way; the output depends on all of them."""

    def __init__(self):
        super().__init__()
        for size in SIZES:
            for way in WAYS:
                self.register_buffer(f"{way}_{size}", torch.zeros(size))

    def forward(self, x):
        for size in SIZES:
            for way in WAYS:
                buffer = getattr(self, f"{way}_{size}")
                x = x + 0.05 * buffer[-1:].sum()
                if self.training:
                    self._write(way, f"{way}_{size}", buffer, x.detach().mean())
        return x

    def _write(self, way, name, buffer, value):
        match way:
            case "in_place":
                buffer.mul_(0.5).add_(value)
            case "slice":
                buffer[-1:] += value
            case "copy":
                buffer.copy_(0.5 * buffer + value)
            case "data":
                buffer.data.mul_(0.5).add_(value)
            case "data_slice":
                buffer.data[-1:] += value
            case "data_assigned":
                buffer.data = 0.5 * buffer + value
            case "replaced":
                setattr(self, name, 0.5 * buffer + value)


class Model(nn.Module):
    def __init__(self, vocab, dim, layers, kinds):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.centred = Centred(dim) if "centred" in kinds else None
        self.statistics = Statistics(dim) if "statistics" in kinds else None
        self.rare = Rare(vocab, 40000) if "rare" in kinds else Rare(vocab, 8) if "rare_small" in kinds else None
        self.sized = Sized() if "sized" in kinds else None
        self.blocks = nn.ModuleList(Block(dim, 0.1) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("scale", self.head.weight.detach().norm(), persistent=False)
        self.table = self.head.weight.detach()[0].clone()

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x if self.centred is None else self.centred(x)
        x = x if self.statistics is None else self.statistics(x)
        x = x if self.rare is None else self.rare(x, tokens)
        x = x if self.sized is None else self.sized(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x / self.scale) + self.table.sum()).float()


class Buffered(Counting):
    """`model.kinds`: which modules with buffers it has. `moving`: the buffers to which the rule of averages applies."""

    moving = (
        *("centred.average", "centred.tokens", "centred.is_used", "rare.seen"),
        *(f"sized.{way}_{size}" for size in SIZES for way in WAYS),
    )

    def build_model(self):
        return Model(29, 21, 2, self.model["kinds"])


class StagedNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.block = Block(dim, 0.0)
        self.norm = nn.BatchNorm1d(dim)
        self.centred = Centred(dim)

    def forward(self, x):
        return self.centred(self.block(x)) + self.norm(x.transpose(1, 2)).transpose(1, 2)


class StagedModel(nn.Module):
    def __init__(self, vocab, dim, layers, counts):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(StagedNorm(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)
        if counts:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        if hasattr(self, "calls"):
            self.calls += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


class Staged(Counting):
    """Its model can be divided into the stages of a pipeline. `model.counts`: a counter is outside of its blocks."""

    moving = tuple(f"blocks.{n}.centred.{name}" for n in range(4) for name in ("average", "tokens", "is_used"))

    def build_model(self):
        return StagedModel(29, 24, 4, self.model.get("counts", False))


class Odd(nn.Module):
    """Changes a buffer in a way that cannot be added up, or a cache."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(29, 21)
        self.head = nn.Linear(21, 29, bias=False)
        odd = torch.full((3,), float("inf")) if way == "infinite" else torch.zeros(3)
        self.average, self.calls = torch.zeros(()), 0
        self.register_buffer("odd", odd, persistent=way != "forgotten")

    def forward(self, tokens):
        match self.way:
            case "average":
                self.average = 0.9 * self.average + 0.1 * tokens.float().mean()
            case "count":
                self.average.add_(1.0)
            case "notes":
                self.average = tokens.float().mean()
                self.calls += 1
            case "forgotten":
                self.odd += 1
            case "infinite":
                self.odd = torch.minimum(self.odd, tokens[0, :3].float())
            case "grows":
                self.odd = torch.cat([self.odd, self.odd])
            case "late":
                self.register_buffer("mask", torch.zeros(2))
            case "cache":
                if not hasattr(self, "mask"):
                    self.register_buffer("mask", torch.arange(tokens.shape[1]) % 2 * 0.1, persistent=False)
                return self.head(self.embed(tokens) + self.mask[:, None]).float()
            case "state":
                if not hasattr(self, "mask"):
                    self.register_buffer("mask", tokens.float().mean(0), persistent=False)
                return self.head(self.embed(tokens) + self.mask[:, None]).float()
        return self.head(self.embed(tokens)).float()


class Wayward(Counting):
    def build_model(self):
        return Odd(self.model["way"])

    def loss(self, model, batch):
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
