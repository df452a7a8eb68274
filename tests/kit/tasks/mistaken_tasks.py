"""Tasks with the common mistakes, each a class; they import nothing from Shoal. The plain task is `Right`."""

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Pairs(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((4,), float(index % 7)), index % 3


class Right:
    def __init__(self, model, data, seed):
        self.model, self.data = model, data

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3))

    def build_dataset(self, split):
        return Pairs(32)

    def loss(self, model, batch):
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)


class ListOfLayers(Right):
    def build_model(self):
        return nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])


class Towers(nn.Module):
    """Each tower is a list without `forward` within the list that the default shards."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        for tower in self.towers:
            for layer in tower:
                inputs = layer(inputs)
        return self.head(inputs)


class NestedLists(Right):
    def build_model(self):
        return Towers()


class Scripted(Right):
    def build_model(self):
        return torch.jit.script(super().build_model())


class Stream(Right):
    def build_dataset(self, split):
        class Endless(torch.utils.data.IterableDataset):
            def __iter__(self):
                yield from Pairs(4)

        return Endless()


class Generated(Right):
    def build_dataset(self, split):
        return (pair for pair in [])


class NoIndex(Right):
    def build_dataset(self, split):
        return {"a": 1}.keys()


class PartOfTheModel(Right):
    def loss(self, model, batch):
        inputs, labels = batch
        return F.cross_entropy(model[2](model[0](inputs)), labels)


class OnWeights(Right):
    def loss(self, model, batch):
        inputs, labels = batch
        return F.cross_entropy(F.linear(model(inputs), model[2].weight[:, :3]), labels)


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 3)
        self.spare = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.used(inputs)


class UnusedParameters(Right):
    def build_model(self):
        return Spare()


class Frozen(Right):
    def build_model(self):
        model = super().build_model()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return model


class Detached(Right):
    def loss(self, model, batch):
        return super().loss(model, batch).detach()


class NoGradient(Right):
    def loss(self, model, batch):
        with torch.no_grad():
            return super().loss(model, batch)


class EmptyTrain(Right):
    def build_dataset(self, split):
        return Pairs(0 if split == "train" else 8)


class MissingPackage(Right):
    def build_model(self):
        import a_package_that_nobody_has

        return a_package_that_nobody_has.model()


class MissingVariable(Right):
    def build_dataset(self, split):
        return Pairs(int(os.environ["DIGITS_LENGTH"]))


class Twice(Right):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        loss.backward()
        return loss


class ScalarParameter(Right):
    def build_model(self):
        model = super().build_model()
        model.scale = nn.Parameter(torch.tensor(1.0))
        return model


class Ragged(Right):
    def build_dataset(self, split):
        return [(torch.zeros(4 + index % 2), 0) for index in range(8)]


class WrongLabels(Right):
    def build_dataset(self, split):
        return [(torch.zeros(4), 7) for _ in range(8)]


class WrongShape(Right):
    def build_dataset(self, split):
        return [(torch.zeros(5), 1) for _ in range(8)]


class IntegerInputs(Right):
    def build_dataset(self, split):
        return [(torch.zeros(4, dtype=torch.int64), 1) for _ in range(8)]


class NoArguments:
    def __init__(self):
        pass


class NoLoss:
    def __init__(self, model, data, seed):
        pass

    def build_model(self):
        return nn.Linear(4, 3)


class NumberLoss(Right):
    def loss(self, model, batch):
        return super().loss(model, batch).item()


class NotReduced(Right):
    def loss(self, model, batch):
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels, reduction="none")


class NothingBuilt(Right):
    def build_model(self):
        super().build_model()


class Words(Right):
    def build_dataset(self, split):
        return [(None, 1) for _ in range(8)]


class KeyedSamples(Right):
    def build_dataset(self, split):
        return {f"sample-{index}": index for index in range(8)}


class RelativePath(Right):
    def build_dataset(self, split):
        with Path("nowhere/digits.csv").open() as file:
            return file.readlines()


class TooManyTokens(Right):
    def build_model(self):
        return nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(4, 3))

    def build_dataset(self, split):
        return [(torch.tensor([9]), 1) for _ in range(8)]


class UnusedBlock(Right):
    def build_model(self):
        class Blocks(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
                self.head = nn.Linear(4, 3)

            def forward(self, inputs):
                return self.head(self.blocks[0](inputs))

        return Blocks()


class EmptyDirectory(Right):
    def build_dataset(self, split):
        return None


class WhereOfOptimizer(Right):
    def build_optimizer(self, model, settings):
        return settings


class Crash(Right):
    def loss(self, model, batch):
        if not model.training:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().loss(model, batch)


class Typo(Right):
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), lables)  # noqa: F821


def train(model, data, seed):
    """A function, where a class is expected."""


class ExpandedParameter(Right):
    def build_model(self):
        model = super().build_model()
        model.scale = nn.Parameter(torch.ones(1).expand(4))
        return model


class SparseParameter(Right):
    def build_model(self):
        model = super().build_model()
        model.thin = nn.Parameter(torch.eye(3).to_sparse())
        return model


class SharedMemory(Right):
    def build_model(self):
        model = super().build_model()
        model.again = nn.Parameter(next(model.parameters()).data.t())
        return model
