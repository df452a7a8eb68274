"""Small training programs as people write them, one class each. The base has the data and the loop's usual members."""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Rows(torch.utils.data.Dataset):
    """Random numbers, a class, and how many of the numbers count."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": index % 3, "length": index % WIDTH, "number": index}


class Program:
    def __init__(self, model, data, seed):
        self.seed = seed

    def build_dataset(self, split):
        return Rows()

    def build_model(self):
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])


class Metrics(Program):
    def loss(self, model, batch):
        logits = model(batch["x"])
        return F.cross_entropy(logits, batch["y"]), {"accuracy": (logits.argmax(1) == batch["y"]).float().mean()}


class Tokens(Program):
    def loss(self, model, batch):
        mask = (torch.arange(WIDTH) < batch["length"][:, None]).float()
        return (model(batch["x"] * mask).square().sum(1) * batch["length"]).sum(), batch["length"].sum()


class Dropout(Program):
    def build_model(self):
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))


class Norm(Program):
    def build_model(self):
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"].double()), batch["y"])


class SyncNorm(Norm):
    def build_model(self):
        return nn.SyncBatchNorm.convert_sync_batchnorm(super().build_model())


class NormAndDropout(Norm):
    def build_model(self):
        return nn.Sequential(*super().build_model(), nn.Dropout(0.1))


class MovingAverage(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(WIDTH, 3)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
            self.calls += 1
        return self.line(x - self.average)


class Buffers(Program):
    moving = ("average", "calls")

    def build_model(self):
        return MovingAverage()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(3, WIDTH), nn.Linear(WIDTH, 3, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x, y):
        return self.head(torch.tanh(x + self.table((y + 1) % 3)))


class TiedWeights(Program):
    def build_model(self):
        return Tied()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"], batch["y"]), batch["y"])


class Frozen(Program):
    def build_model(self):
        model = super().build_model()
        model[0].requires_grad_(False)
        return model


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.scale = nn.Linear(WIDTH, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.line(x) * self.scale.exp()


class Scalar(Program):
    def build_model(self):
        return Temperature()


class OddForms(nn.Module):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.wide = nn.Parameter((torch.randn(3, WIDTH) * 0.3).t())
        self.line = nn.Linear(3, 3)

    def forward(self, x):
        return self.line(x @ self.wide) + self.none.sum()


class EmptyAndTransposed(Program):
    def build_model(self):
        return OddForms()


class Mixed(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=other))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        y = self.line(x).to(self.scale.dtype) * self.scale
        return self.head(torch.view_as_real(y).sum(-1) if y.is_complex() else y.float())


class Double(Program):
    other = torch.float64

    def build_model(self):
        return Mixed(self.other)


class Complex(Double):
    other = torch.complex64


class Half(Double):
    other = torch.bfloat16


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(3))

    def forward(self, x, which):
        return self.heads[which](torch.tanh(self.trunk(x)))


class Branches(Program):
    """The third head is first used by a sample that is read late, and never by most micro-batches."""

    def build_model(self):
        return Branch()

    def loss(self, model, batch):
        first = int(batch["number"][0])
        return F.cross_entropy(model(batch["x"], 2 if first == 7 else first % 2), batch["y"])


class Siamese(Program):
    def loss(self, model, batch):
        one, other = model(batch["x"]), model(batch["x"].roll(1, 1))
        return F.cosine_embedding_loss(one, other, torch.ones(len(one)))


class Penalty(Program):
    """Differentiates twice, as WGAN-GP."""

    def loss(self, model, batch):
        x = batch["x"].requires_grad_()
        scores = model(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return F.cross_entropy(scores, batch["y"]) + (slope.norm(dim=1) - 1).square().mean()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Recomputed(Program):
    def build_model(self):
        return Checkpointed()


class WeightNorm(Program):
    def build_model(self):
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, 3))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.layer(torch.stack([x, x.roll(1, 1), x.roll(2, 1)], 1)).mean(1))


class Transformer(Program):
    def build_model(self):
        return Attention()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cell(x.view(len(x), 3, 2))[0][:, -1])


class Lstm(Program):
    def build_model(self):
        return Recurrent()


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            aim = self.teacher(x)
        return self.student(x), aim


class Distillation(Program):
    def build_model(self):
        return Distilled()

    def loss(self, model, batch):
        own, aim = model(batch["x"])
        return F.kl_div(own.log_softmax(1), aim.softmax(1), reduction="batchmean")


class Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class StraightThrough(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(Signs.apply(self.line(x)))


class OwnFunction(Program):
    def build_model(self):
        return StraightThrough()


class Hooked(Program):
    def build_model(self):
        model = super().build_model()
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return model


class OwnOptimizer(Program):
    def build_optimizer(self, model, settings):
        matrices = [one for one in model.parameters() if one.ndim >= 2]
        others = [one for one in model.parameters() if one.ndim < 2]
        return torch.optim.RMSprop([{"params": matrices, "lr": 0.01}, {"params": others, "lr": 0.02}])


class Collated(Program):
    def collate(self, samples):
        return {
            "x": torch.stack([one["x"].flip(0) for one in samples]),
            "y": torch.tensor([one["y"] for one in samples]),
        }


class Ordered(Rows):
    def samples_at(self, positions, seed):
        return [(position * 7) % len(self) for position in positions]


class OwnOrder(Program):
    def build_dataset(self, split):
        return Ordered()


class Noise(Program):
    """Draws in the loss, as augmentations do."""

    def loss(self, model, batch):
        x = batch["x"]
        return F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), batch["y"])


class Convolutional(Program):
    def build_model(self):
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 4, 2, bias=False),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8, 3),
        ).to(memory_format=torch.channels_last)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.back = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x):
        mean, spread = self.mean(x), self.spread(x)
        return self.back(mean + torch.randn_like(mean) * (0.5 * spread).exp()), mean, spread


class Variational(Program):
    def build_model(self):
        return Autoencoder()

    def loss(self, model, batch):
        found, mean, spread = model(batch["x"])
        kl = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1).mean()
        return F.mse_loss(found, batch["x"]) + 0.1 * kl, {"kl": kl}


class SharedBlock(nn.Module):
    """One block that is used three times."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return self.head(x)


class Repeated(Program):
    def build_model(self):
        return SharedBlock()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.judge = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise=None, points=None):
        points = points if noise is None else self.maker(noise)
        return points, self.judge(points)


class Gan(Program):
    optimizers: ClassVar = {"d": "judge.*", "g": "maker.*"}

    def build_model(self):
        return Pair()

    def training_step(self, model, batch, optimizers):
        noise, real = batch["x"].split(3, 1)

        def judge():
            with torch.no_grad():
                made, _ = model(noise=noise)
            return F.softplus(-model(points=real)[1]).mean() + F.softplus(model(points=made)[1]).mean()

        return {"d": judge, "g": lambda: F.softplus(-model(noise=noise)[1]).mean()}

    def loss(self, model, batch):
        return F.softplus(-model(noise=batch["x"][:, :3])[1]).mean()


class Critics(Gan):
    updates = ("d", "d", "g")


class Contrastive(Program):
    def embed(self, model, batch):
        return model(batch["x"]), model(batch["x"] * 1.1)

    def batch_loss(self, one, other):
        return F.cross_entropy(one @ other.t(), torch.arange(len(one)))


class NoPatterns(Gan):
    optimizers = None


class Unowned(Gan):
    optimizers: ClassVar = {"d": "judge.*", "g": "maker.0.*"}


class TwoOwners(Gan):
    optimizers: ClassVar = {"d": "*", "g": "maker.*"}


class Sparse(Program):
    def build_model(self):
        return nn.Sequential(nn.Embedding(60, 3, sparse=True))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["number"]), batch["y"])


class Lbfgs(Program):
    def build_optimizer(self, model, settings):
        return torch.optim.LBFGS(model.parameters())


class TwoOptimizers(Program):
    def build_optimizer(self, model, settings):
        return [torch.optim.Adam(model[0].parameters()), torch.optim.Adam(model[2].parameters())]


class Forgotten(Program):
    def build_model(self):
        model = MovingAverage()
        model.register_buffer("average", torch.zeros(WIDTH), persistent=False)
        return model


class Clamped(Program):
    def build_model(self):
        return nn.Sequential(nn.Embedding(60, 3, max_norm=0.1))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["number"]), batch["y"])
