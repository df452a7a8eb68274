"""Models that use other parameters for other micro-batches."""

import torch
from torch import nn


class Numbers(torch.utils.data.Dataset):
    """Sample i: four random numbers, and i."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), torch.tensor(index)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.outer = nn.Linear(width, 4)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Branching(nn.Module):
    """Blocks of different widths, of which `uses` chooses some; two heads; one layer that nothing uses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for width in (3, 5, 4, 7))
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.spare = nn.Linear(4, 4)

    def forward(self, x, blocks, head):
        for number in blocks:
            x = self.blocks[number](x)
        return self.heads[head](x)


class Branches:
    """`data.kind` says what a micro-batch uses; `first` is the number of its first sample."""

    def __init__(self, model, data, seed):
        self.kind = data["kind"]

    def build_model(self):
        return Branching()

    def build_dataset(self, split):
        return Numbers()

    def collate(self, samples):
        return torch.utils.data.default_collate(samples)

    def loss(self, model, batch):
        x, numbers = batch
        first = int(numbers[0])
        return ((model(x, *self.use(first)) - x.roll(1, 1)) ** 2).mean()

    def use(self, first):
        match self.kind:
            case "heads":
                return (0, 1, 2, 3), first % 2
            case "skipped":  # LayerDrop
                return [number for number in range(4) if (first + number) % 3], 0
            case "order":
                return ((3, 0, 1, 2), 0) if first % 2 else ((0, 1, 2, 3), 0)
            case "twice":
                return ((0, 1, 1, 2), 0) if first % 4 == 0 else ((0, 1, 2), 0)
            case "rare":  # the last block in one micro-batch of the epoch
                return ((0, 1, 2, 3), 0) if first == 37 else ((0, 1, 2), 0)
            case "never":
                return (0, 1, 2), 0


class Hooked(Branches):
    """A hook on a parameter: its gradient in each micro-batch is cut to a range."""

    def build_model(self):
        model = Branching()
        for parameter in (model.blocks[0].inner.weight, model.heads[0].weight):
            parameter.register_hook(lambda gradient: gradient.clamp(-0.001, 0.002))
        if self.kind == "accumulated":
            model.heads[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
        return model

    def use(self, first):
        return (0, 1, 2), 0


class Writes(Branches):
    """A forward pass that writes to a parameter."""

    def build_model(self):
        model = Branching()
        if self.kind == "clamp":
            model.blocks[1].register_forward_pre_hook(self._clamp)
        else:
            model.blocks[1] = Renormalised()
        return model

    @staticmethod
    def _clamp(module, inputs):
        with torch.no_grad():
            module.inner.weight.clamp_(-0.1, 0.1)

    def use(self, first):
        return (0, 1, 2), 0


class Renormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4, max_norm=0.5)

    def forward(self, x):
        return x + self.table((x.abs() * 4).long().clamp(max=7)).sum(1)
