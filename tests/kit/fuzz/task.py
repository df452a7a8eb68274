"""The task class of a description, as a user would write it. It imports nothing of Shoal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kit.fuzz import decoders
from kit.fuzz.draw import Description
from kit.fuzz.optimizers import build_optimizer, grouped
from kit.fuzz.pieces import build_piece
from kit.fuzz.plain_pieces import is_chosen


class Samples(torch.utils.data.Dataset):
    """(values (T, W), number of the sample)"""

    def __init__(self, first, size, length, width):
        self.first, self.size, self.length, self.width = first, size, length, width

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        return torch.randn(self.length, self.width, generator=generator), torch.tensor(self.first + index)


class Model(nn.Module):
    def __init__(self, description: Description) -> None:
        super().__init__()
        width = description.width
        self.kinds = [piece.kind for piece in description.pieces]
        self.inlet_kind, self.head_kind, self.container = description.inlet, description.head, description.container
        pieces = [build_piece(piece.kind, width, dict(piece.options)) for piece in description.pieces]
        if description.head == "linear" and description.is_reversed:
            self.head = nn.Linear(width, width)
        order = list(range(len(pieces)))[:: -1 if description.is_reversed else 1]
        match description.container:
            case "attributes":
                for index in order:
                    self.add_module(f"piece{index}", pieces[index])
            case "dict":
                self.pieces = nn.ModuleDict({str(index): pieces[index] for index in order})
            case "nested":
                self.body = nn.Module()
                self.body.pieces = nn.ModuleList(pieces[index] for index in order)
            case _:
                self.pieces = nn.ModuleList(pieces[index] for index in order)
        self.order = order
        self.inlet = nn.Embedding(13, width) if description.inlet == "embedding" else nn.Linear(width, width)
        if not hasattr(self, "head"):
            self.head = nn.Linear(width, width)
        if description.head == "tied" and description.inlet == "linear":
            self.head.weight = self.inlet.weight
        for index, kind in enumerate(self.kinds):
            if kind == "tied_to_first":
                pieces[index].line.weight = self.inlet.weight if description.inlet == "linear" else self.head.weight
        for number, parameter in enumerate(self.parameters()):
            parameter.is_slow = number % 2 == 1

    def piece(self, index):
        match self.container:
            case "attributes":
                return getattr(self, f"piece{index}")
            case "dict":
                return self.pieces[str(index)]
            case "nested":
                return self.body.pieces[self.order.index(index)]
        return self.pieces[self.order.index(index)]

    def forward(self, x, numbers):
        y = x + self.inlet(numbers % 13)[:, None] if self.inlet_kind == "embedding" else self.inlet(x)
        for index, kind in enumerate(self.kinds):
            piece = self.piece(index)
            if kind != "skipped" or is_chosen(piece.by, numbers, self.training):
                y = piece(y, numbers)
        return self.head(y)


class Drawn:
    def __init__(self, model, data, seed):
        self.description = Description.from_json(model)
        optim = self.description.optim
        self.elementwise_optimizer = (optim.options or {}).get("declared")
        if optim.kind == "builtin":
            self.build_optimizer = None
        self.baseline = torch.zeros(())

    def build_model(self):
        d = self.description
        return Model(d) if d.decoder is None else decoders.Model(d.decoder)

    def build_dataset(self, split):
        d = self.description
        if d.decoder is not None:
            return decoders.Chain(*((0, d.num_samples) if split == "train" else (1000, 5)), d.decoder)
        return Samples(0, d.num_samples, d.length, d.width) if split == "train" else Samples(1000, 5, d.length, d.width)

    def build_optimizer(self, model, settings):
        optim = self.description.optim
        groups = grouped(model, optim.groups, settings["lr"])
        return build_optimizer(optim.kind, dict(optim.options or {}), groups, settings["lr"])

    def loss(self, model, batch):
        d = self.description
        if d.decoder is not None:
            return decoders.loss_of(d.decoder, model, batch, has_metrics=d.has_metrics)
        x, numbers = batch
        y = model(x, numbers)
        if self.description.loss == "labels":
            labels = (numbers[:, None] + torch.arange(y.shape[1])) % y.shape[2]
            loss = F.cross_entropy(y.flatten(0, 1), labels.flatten())
            accuracy = (y.argmax(-1) == labels).float().mean()
        else:
            loss = (y - x.roll(1, 2)).square().mean()
            accuracy = (y.detach() > 0).float().mean()
            if self.description.loss == "penalty":
                loss = loss + 0.05 * sum(p.abs().square().sum() for p in model.parameters() if p.requires_grad)
            if self.description.loss == "carried_by_task":
                loss = loss * (1 + self.baseline)
                if model.training:
                    self.baseline = 0.9 * self.baseline + 0.1 * loss.detach().float()
        return (loss, {"accuracy": accuracy}) if self.description.has_metrics else loss
