"""Tasks whose loss compares each sample of the global batch with all others."""

import torch
import torch.nn.functional as F
from torch import nn


class Pairs(torch.utils.data.Dataset):
    """Two noisy views of a point, and its kind."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        point = torch.randn(12, generator=generator)
        views = [point + 0.3 * torch.randn(12, generator=generator) for _ in range(2)]
        return *views, index % 3


class Towers(nn.Module):
    """As in CLIP: two encoders and a temperature. BatchNorm counts what passes, dropout draws."""

    def __init__(self, norm):
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(12, 16), getattr(nn, norm)(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8))
            for _ in range(2)
        )
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, y):
        half = (0.5 * self.temperature).exp()
        return F.normalize(self.left(x), dim=1) * half, F.normalize(self.right(y), dim=1) * half


class Clip:
    def __init__(self, model, data, seed):
        self.data = data

    def build_model(self):
        return Towers(self.data.get("norm", "BatchNorm1d"))

    def build_dataset(self, split):
        return Pairs()

    def embed(self, model, batch):
        x, y, _ = batch
        return model(x, y)

    def batch_loss(self, x, y):
        scores, own = x @ y.t(), torch.arange(len(x), device=x.device)
        loss = (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2
        return loss, {"accuracy": (scores.argmax(1) == own).float().mean(), "negatives": len(x) - 1}

    def loss(self, model, batch):
        return self.batch_loss(*self.embed(model, batch))


class Supervised(Clip):
    """The kinds of the samples are exchanged beside their embeddings, and have no gradient."""

    def embed(self, model, batch):
        x, y, kinds = batch
        left, right = model(x, y)
        return left, right, kinds

    def batch_loss(self, x, y, kinds):
        same = (kinds[:, None] == kinds[None]).float()
        return (
            -(F.log_softmax(x @ x.t() + 0.1 * torch.randn((), device=x.device), dim=1) * same)
            .sum(1)
            .div(same.sum(1))
            .mean()
        )


class HalfOfIt(Clip):
    batch_loss = None


class FewRows(Clip):
    def embed(self, model, batch):
        return tuple(one.mean(0) for one in model(*batch[:2]))


class Weighs(Clip):
    def batch_loss(self, x, y):
        return (x @ y.t()).sum(), len(x)
