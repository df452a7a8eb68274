"""Tasks with metrics of their own; they import nothing from Shoal."""

import torch
from tiny_tasks import Block, Counting
from torch import nn
from torch.nn import functional as F


class Metered(Counting):
    """A tensor that is the loss itself, a tensor of integers, and a plain number."""

    def loss(self, model, batch):
        logits, labels = model(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        hits = (logits.argmax(-1) == labels).float().mean()
        first = batch[:, 0].sum().item() / len(batch)
        return loss, {"same": loss, "accuracy": hits, "data/first": first, "two": torch.tensor(2)}


class Steps(nn.Module):
    def __init__(self, vocab, dim, layers):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, 0.0) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


class Staged(Metered):
    """Its model can be divided into the stages of a pipeline."""

    def build_model(self):
        return Steps(29, 24, 4)


class Wayward(Counting):
    """Its metrics are wrong in the way that `model.way` names."""

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        loss = super().loss(model, batch)
        rank = torch.distributed.get_rank()
        match self.model["way"]:
            case "rank":
                return loss, {"a": 1.0} if rank == 1 else {"a": 1.0, "b": 2.0}
            case "step":
                return loss, {"a": 1.0} if self.calls < 5 else {}
            case "nan":
                return loss, {"a": float("nan"), "b": 2.0}
            case "text":
                return loss, {"a": "0.5"}
