"""Tasks with parameters of every dtype and form."""

import torch
from torch import nn


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return torch.stack([x, x.roll(1)])


class Spectral(nn.Module):
    """As in neural operators: one module with parameters of a complex dtype and of a real one."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 2, dtype=dtype) * 0.3)
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight.sum(1), n=16).to(x.dtype) + self.shift


class Scaled(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16, dtype=dtype))
        self.rows = nn.Parameter(torch.arange(15, -1, -1), requires_grad=False)

    def forward(self, x):
        return x + (x[:, self.rows] * self.scale.to(x.dtype)).tanh()


class Odd(nn.Module):
    def __init__(self, of):
        super().__init__()
        kind = getattr(torch, of)
        self.blocks = nn.ModuleList([Spectral(kind) if kind.is_complex else Scaled(kind) for _ in range(2)])
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Task:
    tokens_per_sample = 1

    def __init__(self, model, data, seed):
        self.model = model

    def build_model(self):
        return Odd(self.model["of"])

    def build_dataset(self, split):
        return Samples()

    def loss(self, model, batch):
        return ((model(batch[:, 0]).float() - batch[:, 1]) ** 2).mean()


class Temperature(nn.Module):
    """A scalar parameter, which another module has as well."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.shift = nn.Parameter(torch.tensor(0.2))

    def forward(self, x):
        assert self.scale.shape == self.shift.shape == ()
        return x * torch.stack([self.scale, self.shift]).exp().sum() + self.scale


class Forms(Task):
    """Transposed, channels_last, empty, sliced and scalar parameters."""

    def build_model(self):
        model = nn.Module()
        model.wide = nn.Parameter(torch.randn(3, 16).t() * 0.2)
        model.image = nn.Parameter((torch.randn(2, 3, 2, 4) * 0.2).to(memory_format=torch.channels_last))
        model.none = nn.Parameter(torch.zeros(0, 5))
        whole = torch.randn(16, 6) * 0.2
        model.left, model.right = nn.Parameter(whole[:, :2]), nn.Parameter(whole[:, 2:])
        model.scale = nn.Parameter(torch.tensor(-0.5))
        model.scale.register_hook(lambda gradient: gradient / gradient.new_full((), 2.0))
        model.heat, model.cool = Temperature(model.scale), Temperature(model.scale)
        model.forward = lambda x: (
            model.cool(model.heat(x)) * model.scale
            + (x @ model.wide) @ model.wide.t()
            + (x @ model.left) @ model.right[:, :2].t()
            + model.image.sum((0, 2)).repeat(1, 2)[:, :4].reshape(-1)[:1]
            + (model.none.sum())
        )
        return model
