"""A task whose forward pass writes to its parameters, each time or once, in the ways that programs do it."""

import torch
from torch import nn


class Written(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.line = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("is_ready", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        weight = self.line.weight
        match self.kind:
            case "no_grad":
                with torch.no_grad():
                    weight.clamp_(-0.2, 0.2)
            case "data":
                weight.data.clamp_(-0.2, 0.2)
            case "assigned":  # max-norm, as in EEGNet
                weight.data = torch.renorm(weight.data, 2, 0, 0.3)
            case "copied":
                weight.data.copy_(torch.renorm(weight.data, 2, 0, 0.3))
            case "decayed":
                if self.training:
                    weight.data.mul_(0.9)
            case "once":  # by the first samples, as ActNorm does
                if self.training and not bool(self.is_ready):
                    self.line.bias.data.copy_(x.detach().mean(0))
                    self.is_ready.fill_(1)
        return self.head(torch.tanh(self.line(x)))


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.sum().view(1)


class Writing:
    tokens_per_sample = 1

    def __init__(self, model, data, seed):
        self.kind, self.seed = model["kind"], seed

    def build_model(self):
        return Written(self.kind)

    def build_dataset(self, split):
        return Samples()

    def loss(self, model, batch):
        x, y = batch
        return ((model(x) - y) ** 2).mean()


class Taught(nn.Module):
    """A frozen teacher follows the student."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 1), nn.Linear(4, 1)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        return self.student(x), self.teacher(x)


class Teaching(Writing):
    def build_model(self):
        return Taught()

    def loss(self, model, batch):
        x, y = batch
        own, aim = model(x)
        teacher, student = model.teacher.weight, model.student.weight
        match self.kind:
            case "no_grad":
                with torch.no_grad():
                    teacher.lerp_(student, 0.1)
            case "data":
                teacher.data.lerp_(student.data, 0.1)
            case "assigned":
                teacher.data = torch.lerp(teacher.data, student.data, 0.1)
            case "backward":
                own.register_hook(lambda _: self._shrink(teacher))
        return ((own - y) ** 2).mean() + (own - aim).square().mean()

    @staticmethod
    def _shrink(teacher):
        teacher.data.mul_(0.9)
