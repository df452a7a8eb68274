"""Tasks with BatchNorm, for statistics of the whole global batch."""

import torch
from torch import nn
from torch.nn import functional as F


class Images(torch.utils.data.Dataset):
    """Noise with a trend that grows with the number of the sample, so that micro-batches differ much."""

    def __len__(self):
        return 90

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, 5, 5, generator=generator) + index / 15, index % 4


class Residual(nn.Module):
    """As in ResNet; the last normalisation is called twice."""

    def __init__(self, dim, norm):
        super().__init__()
        self.first, self.second = (nn.Conv2d(dim, dim, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = norm(dim), nn.BatchNorm2d(dim, momentum=None)

    def forward(self, x):
        y = self.last(self.second(F.relu(self.norm(self.first(x)))))
        return F.relu(x + self.last(y + 1))


class Resnet(nn.Module):
    def __init__(self, norm, dropout):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6)
        self.blocks = nn.ModuleList(Residual(6, norm) for _ in range(2))
        self.plain = nn.BatchNorm1d(6, affine=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(self.plain(x.mean((2, 3)))))


class Task:
    norm = nn.BatchNorm2d

    def __init__(self, model, data, seed):
        self.model = model
        self.dtype = torch.float32 if model.get("half") else torch.float64

    def build_model(self):
        """In double precision, where the layers one after the other do not enlarge rounding up to what is compared."""
        return Resnet(self.norm, self.model.get("dropout", 0.0)).to(self.dtype)

    def build_dataset(self, split):
        return Images()

    def loss(self, model, batch):
        images, labels = batch
        logits = model(images.to(self.dtype)).to(self.dtype)
        accuracy = (logits.argmax(1) == labels).float().mean()
        if self.model.get("sums"):
            counts = (labels != 0).sum()
            return (F.cross_entropy(logits, labels, reduction="none") * (labels != 0)).sum(), counts
        return F.cross_entropy(logits, labels), {"accuracy": accuracy}


class Converted(Task):
    def build_model(self):
        return nn.SyncBatchNorm.convert_sync_batchnorm(super().build_model())


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 0.5


class Own(Task):
    norm = OwnNorm


class NoNorm(Task):
    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(50, 4)).double()


class Chosen(nn.Module):
    """Runs another normalisation for other samples."""

    def __init__(self):
        super().__init__()
        self.few, self.many = nn.BatchNorm1d(50), nn.BatchNorm1d(50)
        self.head = nn.Linear(50, 4)

    def forward(self, x):
        x = x.flatten(1)
        return self.head((self.many if x.mean() > 3 else self.few)(x))


class Branches(Task):
    def build_model(self):
        return Chosen().double()
