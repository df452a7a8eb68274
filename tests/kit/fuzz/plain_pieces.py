"""Modules of drawn tasks that keep nothing from one call to the next one but parameters: branches, ties, hooks, shapes,
random numbers, recomputation. See `pieces.py`.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


def is_chosen(by: str, numbers: Tensor, training: bool) -> bool:
    """Whether this micro-batch takes the branch: by its samples, or by the random numbers of the step."""
    match by:
        case "parity":
            return int(numbers.sum()) % 2 == 0
        case "rare":
            return int(numbers.sum()) % 5 == 0
    return not training or random.random() < 0.5


class Base(nn.Module):
    """`body` of the input, squashed and added to it."""

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return x + 0.5 * torch.tanh(self.body(x, numbers))

    def body(self, x: Tensor, numbers: Tensor) -> Tensor:
        raise NotImplementedError


class Linear(Base):
    def __init__(self, width, bias=True):
        super().__init__()
        self.line = nn.Linear(width, width, bias=bias)

    def body(self, x, numbers):
        return self.line(x)


class Branches(Base):
    def __init__(self, width, by, both):
        super().__init__()
        self.by, self.both = by, both
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def body(self, x, numbers):
        first = is_chosen(self.by, numbers, self.training)
        if self.both:  # one of them always
            return self.a(x) + self.b(x) if first else self.a(x)
        return self.a(x) if first else self.b(x)


class Skipped(Linear):
    """The model does not call it for some micro-batches."""

    def __init__(self, width, by):
        super().__init__(width)
        self.by = by


class BySample(Base):
    """Each sample goes through one of two; if `empty`, sometimes through neither, and some call gets no sample."""

    def __init__(self, width, empty):
        super().__init__()
        self.modulus = 5 if empty else 2
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def body(self, x, numbers):
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = numbers % self.modulus == index
            y[mask] = expert(x[mask])
        return y


class Unused(Linear):
    def __init__(self, width):
        super().__init__(width)
        self.spare = nn.Linear(width, width + 1)


class Frozen(Base):
    def __init__(self, width, what):
        super().__init__()
        self.line, self.after = nn.Linear(width, width), nn.Linear(width, width)
        for name, parameter in self.line.named_parameters():
            parameter.requires_grad_(what not in ("all", name))

    def body(self, x, numbers):
        return self.after(torch.tanh(self.line(x)))


class NoGrad(Base):
    """Trainable parameters that no gradient reaches."""

    def __init__(self, width):
        super().__init__()
        self.line, self.after = nn.Linear(width, width), nn.Linear(width, width)

    def body(self, x, numbers):
        with torch.no_grad():
            y = torch.tanh(self.line(x))
        return self.after(y)


class TiedInside(Base):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.down.weight = self.up.weight

    def body(self, x, numbers):
        return self.down(torch.tanh(self.up(x)))


class Twice(Base):
    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, width)

    def body(self, x, numbers):
        return self.line(torch.tanh(self.line(x)))


class WeightNorm(Base):
    def __init__(self, width, old):
        super().__init__()
        line = nn.Linear(width, width)
        self.line = nn.utils.weight_norm(line) if old else parametrizations.weight_norm(line)

    def body(self, x, numbers):
        return self.line(x)


class Orthogonal(Base):
    def __init__(self, width):
        super().__init__()
        self.line = parametrizations.orthogonal(nn.Linear(width, width))

    def body(self, x, numbers):
        return self.line(x)


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(0, 1)


class OwnParametrization(Base):
    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, width)
        parametrize.register_parametrization(self.line, "weight", _Symmetric())

    def body(self, x, numbers):
        return self.line(x)


class Hooks(Base):
    def __init__(self, width, kind):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.kind = kind
        match kind:
            case "forward":
                self.line.register_forward_hook(lambda module, inputs, output: output * 1.5)
            case "pre":
                self.line.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.7,))
            case "backward":
                self.line.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))

    def body(self, x, numbers):
        y = self.line(x)
        if self.kind == "output" and y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return y


class ParameterHook(Base):
    """Changes the gradient of one parameter."""

    def __init__(self, width, kind):
        super().__init__()
        self.line = nn.Linear(width, width)
        if kind == "gradient":
            self.line.weight.register_hook(lambda gradient: gradient * 0.5)
        else:
            self.line.weight.register_post_accumulate_grad_hook(_clamp)

    def body(self, x, numbers):
        return self.line(x)


def _clamp(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


class Recompute(Base):
    def __init__(self, width, reentrant, branch):
        super().__init__()
        self.reentrant, self.branch = reentrant, branch
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def body(self, x, numbers):
        if self.branch and not is_chosen("parity", numbers, self.training):
            return self.first(x)
        return checkpoint(lambda y: self.second(torch.tanh(self.first(y))), x, use_reentrant=self.reentrant)


class Recurrent(Base):
    def __init__(self, width, kind, layers):
        super().__init__()
        kinds = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
        self.cells = kinds[kind](width, width, num_layers=layers, batch_first=True)

    def body(self, x, numbers):
        return self.cells(x)[0]


class Attention(Base):
    def __init__(self, width, kind):
        super().__init__()
        self.kind = kind
        match kind:
            case "own":
                self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
            case "multihead":
                self.attention = nn.MultiheadAttention(width, 1, batch_first=True)
            case "encoder":
                self.layer = nn.TransformerEncoderLayer(width, 1, 2 * width, dropout=0.1, batch_first=True)

    def body(self, x, numbers):
        match self.kind:
            case "own":
                return self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True))
            case "multihead":
                return self.attention(x, x, x, need_weights=False)[0]
        return self.layer(x)


class Convolution(Base):
    def __init__(self, width):
        super().__init__()
        self.one = nn.Conv1d(width, width, 3, padding=1)
        self.two = nn.ConvTranspose1d(width, width, 1, bias=False)

    def body(self, x, numbers):
        return self.two(torch.tanh(self.one(x.transpose(1, 2)))).transpose(1, 2)


class OtherDtype(Base):
    """Parameters of another dtype beside those of float32."""

    def __init__(self, width, dtype):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.other = nn.Parameter((torch.randn(width, width) * 0.3).to(getattr(torch, dtype)))

    def body(self, x, numbers):
        y = self.line(x).to(self.other.dtype) @ self.other
        return (y.real if y.is_complex() else y).to(x.dtype)


class Shapes(Base):
    def __init__(self, width, kind):
        super().__init__()
        self.kind = kind
        self.line = nn.Linear(width, width)
        shape = {"prime": (13,), "one": (1,), "scalar": (), "empty": (0, width), "transposed": (width, 5)}
        value = torch.randn(shape.get(kind, (2, 3, width))) * 0.3
        self.extra = nn.Parameter(value.t() if kind == "transposed" else value)

    def body(self, x, numbers):
        y = self.line(x)
        match self.kind:
            case "prime":
                return y * self.extra.square().sum().sqrt()
            case "transposed":
                return y @ self.extra.t() @ self.extra
            case "empty":
                return y + self.extra.sum(0)
            case "three":
                return y + self.extra.sum((0, 1))
        return y * (1 + self.extra)


class Collections(Base):
    def __init__(self, width, kind):
        super().__init__()
        self.kind = kind
        first, second = (nn.Parameter(torch.randn(width) * 0.3) for _ in range(2))
        self.lines = nn.ModuleDict({"a.b".replace(".", "_"): nn.Linear(width, width)})
        self.held = nn.ParameterList([first, second]) if kind == "list" else nn.ParameterDict({"z": first, "a": second})

    def body(self, x, numbers):
        first, second = list(self.held) if self.kind == "list" else (self.held["z"], self.held["a"])
        return self.lines["a_b"](x * (1 + first)) + second


class Dropout(Base):
    def __init__(self, width, p):
        super().__init__()
        self.line, self.dropout = nn.Linear(width, width), nn.Dropout(p)

    def body(self, x, numbers):
        return self.dropout(self.line(x))


class Lookup(Base):
    def __init__(self, width, option):
        super().__init__()
        self.option = option
        options = {
            "padding_idx": {"padding_idx": 3},
            "max_norm": {"max_norm": 1.0},
            "scale_grad_by_freq": {"scale_grad_by_freq": True},
            "sparse": {"sparse": True},
        }
        self.table = nn.EmbeddingBag(7, width) if option == "bag" else nn.Embedding(7, width, **options.get(option, {}))

    def body(self, x, numbers):
        if self.option == "bag":
            return x + self.table(torch.stack([numbers % 7, numbers % 5], 1))[:, None]
        return x + self.table(numbers % 7)[:, None]


class Borrowed(Base):
    """It computes with the weight of a module that it does not call."""

    def __init__(self, width):
        super().__init__()
        self.line, self.after = nn.Linear(width, width), nn.Linear(width, width)

    def body(self, x, numbers):
        return F.linear(torch.tanh(self.after(x)), self.line.weight.t(), self.line.bias)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class OwnFunction(Base):
    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.rand(width))

    def body(self, x, numbers):
        return _Rounded.apply(self.line(x), self.weight)


class _Outputs(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return {"a": a, "b": [b]} if self.kind == "dict" else (a, (b,))


class NestedOutputs(Base):
    def __init__(self, width, kind):
        super().__init__()
        self.inner = nn.ModuleList([_Outputs(width, kind)])

    def body(self, x, numbers):
        found = self.inner[0](x)
        a, (b,) = (found["a"], found["b"]) if isinstance(found, dict) else found
        return a * torch.sigmoid(b)


class Noise(Base):
    def __init__(self, width, kind):
        super().__init__()
        self.kind = kind
        self.line = nn.Linear(width, width)

    def body(self, x, numbers):
        if not self.training:
            return self.line(x)
        match self.kind:
            case "torch":
                return self.line(x + 0.1 * torch.randn(x.shape).to(x.dtype))
            case "numpy":
                return self.line(x + 0.1 * float(np.random.standard_normal()))
        return self.line(x + 0.1 * random.gauss(0, 1))


class Lazy(Base):
    def __init__(self, width):
        super().__init__()
        self.line = nn.LazyLinear(width)

    def body(self, x, numbers):
        return self.line(x)


class DoubleBackward(Base):
    """The gradient of its own output takes part in it."""

    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, width)

    def body(self, x, numbers):
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.line(point)).sum(), point, create_graph=True)
        return self.line(x) + slope


class InnerList(Base):
    """A list of blocks within a block; the last one is skipped for some samples if `skips`."""

    def __init__(self, width, skips):
        super().__init__()
        self.skips = skips
        self.lines = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))

    def body(self, x, numbers):
        x = self.lines[0](x)
        return x if self.skips and is_chosen("parity", numbers, self.training) else self.lines[1](x)
