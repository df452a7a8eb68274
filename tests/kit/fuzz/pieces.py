"""The modules of drawn tasks, written as users write them: (B, T, W) in and out, and the samples' numbers (B,).

They import no part of Shoal. They keep values small, so that few steps do not amplify rounding, and they depend on
samples, the step's random numbers and buffers only. What changes a buffer does so while training only.
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


class BatchNorm(Base):
    def __init__(self, width, affine, momentum, tracks):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width, eps=0.1, affine=affine, momentum=momentum, track_running_stats=tracks)

    def body(self, x, numbers):
        y = self.line(x).transpose(1, 2)
        y = torch.cat([y, -y, 0.5 * y], 0)  # more than one value for each channel
        return self.norm(y)[: len(x)].transpose(1, 2)


class InstanceNorm(Base):
    def __init__(self, width, tracks):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.norm = nn.InstanceNorm1d(width, eps=0.1, affine=True, track_running_stats=tracks)

    def body(self, x, numbers):
        y = self.line(x).transpose(1, 2)
        return self.norm(torch.cat([y, -y, 0.5 * y], 2))[..., : x.shape[1]].transpose(1, 2)


class Norm(Base):
    def __init__(self, width, kind):
        super().__init__()
        self.line = nn.Linear(width, width)
        match kind:
            case "layer":
                self.norm = nn.LayerNorm(width, eps=0.1)
            case "rms":
                self.norm = nn.RMSNorm(width, eps=0.1)
            case "group":
                self.norm = nn.GroupNorm(1, width, eps=0.1)

    def body(self, x, numbers):
        y = self.line(x)
        return self.norm(y.flatten(0, 1)).view_as(y)


class Ema(Base):
    """The output depends on a moving average that training moves."""

    def __init__(self, width, in_place, persistent):
        super().__init__()
        self.in_place = in_place
        self.line = nn.Linear(width, width)
        self.register_buffer("average", torch.full((width,), 0.1), persistent=persistent)

    def body(self, x, numbers):
        y = self.line(x - self.average)
        if self.training:
            now = y.detach().mean((0, 1))
            if self.in_place:
                self.average.lerp_(now, 0.2)
            else:
                self.average = 0.8 * self.average + 0.2 * now
        return y


class Counter(Base):
    """An integer that counts micro-batches; the output depends on it."""

    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def body(self, x, numbers):
        y = self.line(x) / (1 + 0.05 * self.calls)
        if self.training:
            self.calls += 1
        return y


class Late(Base):
    """A part that is used from the third step on: no gradient and no optimizer state before."""

    def __init__(self, width):
        super().__init__()
        self.line, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def body(self, x, numbers):
        y = self.line(x)
        if int(self.calls) >= 6:
            y = y + self.head(x)
        if self.training:
            self.calls += 1
        return y


class DerivedBuffer(Base):
    """A buffer that is not saved, computed while the model is built."""

    def __init__(self, width, of):
        super().__init__()
        self.line = nn.Linear(width, width)
        value = self.line.weight.detach().abs().sum(0) if of == "weight" else torch.linspace(0.5, 1, width)
        self.register_buffer("scale", value, persistent=False)

    def body(self, x, numbers):
        return self.line(x * self.scale)


class DerivedAttribute(Base):
    """As above, not even a buffer."""

    def __init__(self, width, kind):
        super().__init__()
        self.line = nn.Linear(width, width)
        value = self.line.weight.detach().abs().mean(0)
        self.scale = value.clone() if kind == "tensor" else float(value.sum())

    def body(self, x, numbers):
        return self.line(x * self.scale)


class ConstantBuffer(Base):
    def __init__(self, width, persistent):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.register_buffer("mask", (torch.rand(width) < 0.7).float(), persistent=persistent)

    def body(self, x, numbers):
        return self.line(x * self.mask)


class SharedBuffer(Base):
    """One tensor is a buffer of two modules."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        shift = torch.rand(width)
        self.a.register_buffer("shift", shift)
        self.b.register_buffer("shift", shift)

    def body(self, x, numbers):
        return self.a(x + self.a.shift) + self.b(x - self.b.shift)


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


class SpectralNorm(Base):
    def __init__(self, width):
        super().__init__()
        self.line = parametrizations.spectral_norm(nn.Linear(width, width))

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


class SizedBuffer(Base):
    """A buffer of any size, written in a drawn way; the output depends on its last element."""

    def __init__(self, width, size, written):
        super().__init__()
        self.written = written
        self.line = nn.Linear(width, width)
        self.register_buffer("kept", torch.zeros(size))

    def body(self, x, numbers):
        y = self.line(x) + self.kept[-1:].sum()
        if self.training:
            self._write(y.detach().mean())
        return y

    def _write(self, value):
        match self.written:
            case "in_place":
                self.kept.mul_(0.5).add_(value)
            case "slice":
                self.kept[-1:] += value
            case "copy":
                self.kept.copy_(0.5 * self.kept + value)
            case "data":
                self.kept.data.mul_(0.5).add_(value)
            case "data_slice":
                self.kept.data[-1:] += value
            case "data_assigned":
                self.kept.data = 0.5 * self.kept + value
            case "replaced":
                self.kept = 0.5 * self.kept + value


class SizedParameter(Base):
    def __init__(self, width, size):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.extra = nn.Parameter(torch.randn(size) * 0.3)

    def body(self, x, numbers):
        return self.line(x) + self.extra[-1:].sum() + self.extra.square().sum() / (1 + self.extra.numel())


class WrittenParameter(Base):
    """A parameter that its own forward pass writes: a constraint, or an initialisation by the first samples."""

    def __init__(self, width, written):
        super().__init__()
        self.written = written
        self.line = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("is_ready", torch.zeros((), dtype=torch.int64))

    def body(self, x, numbers):
        weight = self.line.weight
        match self.written:
            case "no_grad":
                with torch.no_grad():
                    weight.clamp_(-0.2, 0.2)
            case "data":
                weight.data.clamp_(-0.2, 0.2)
            case "data_assigned":
                weight.data = torch.renorm(weight.data, 2, 0, 0.3)
            case "data_copied":
                weight.data.copy_(torch.renorm(weight.data, 2, 0, 0.3))
            case "once":
                if self.training and not bool(self.is_ready):
                    self.scale.data.copy_(1 / (x.detach().std((0, 1), unbiased=False) + 0.1))
                    self.is_ready.fill_(1)
        return self.line(x) * self.scale


class Reached(Base):
    """A weight that is used twice, the second time by another reference to it."""

    def __init__(self, width, by):
        super().__init__()
        self.line = nn.Linear(width, width)
        weight = self.line.weight
        match by:
            case "attribute":
                self.again = weight
            case "list":
                self.held = [weight]
            case "tuple":
                self.held = (weight,)
            case "dict":
                self.held = {0: weight}
            case "closure":
                self.read = lambda: weight
            case "data":
                self.again = weight.data
            case "detached_buffer":
                self.register_buffer("again", weight.detach(), persistent=False)
            case "computed":  # its plain attribute `weight` is in the memory of `weight_orig` until the first call
                self.line = nn.utils.spectral_norm(self.line)
                self.read = lambda: self.line.weight

    def body(self, x, numbers):
        y = torch.tanh(self.line(x))
        if hasattr(self, "again"):
            return F.linear(y, self.again)
        return F.linear(y, self.held[0] if hasattr(self, "held") else self.read())


class Carried(Base):
    """What it has computed for the micro-batch before is added to its output."""

    def __init__(self, width, **options):
        super().__init__()
        self.kept_in = options["in"]
        self.line = nn.Linear(width, width)
        self.last = None
        match self.kept_in:
            case "buffer":
                del self.last
                self.register_buffer("last", torch.zeros(width))
            case "list":
                self.last = []
            case "dict":
                self.last = {}

    def body(self, x, numbers):
        y = self.line(x)
        match self.kept_in:
            case "buffer" | "tensor":
                before = self.last
            case "tuple":
                before = None if self.last is None else self.last[0]
            case "list":
                before = torch.stack(self.last).mean(0) if self.last else None
            case "dict":
                before = self.last.get("value")
        if self.training:
            self._keep(y.detach().mean((0, 1)))
        return y if before is None else y + 0.5 * before

    def _keep(self, value):
        match self.kept_in:
            case "buffer":
                self.last.copy_(value)
            case "tensor":
                self.last = value
            case "tuple":
                self.last = (value,)
            case "list":
                self.last.append(value)
                del self.last[:-2]
            case "dict":
                self.last["value"] = value


class Number(Base):
    """A plain number that training changes; the output depends on it."""

    def __init__(self, width):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.temperature = 2.0

    def body(self, x, numbers):
        y = self.line(x) / self.temperature
        if self.training:
            self.temperature *= 0.9
        return y


class Hidden(Base):
    """Has a parameter that the optimizer, or the model, does not know."""

    def __init__(self, width, what):
        super().__init__()
        self.what = what
        self.line = nn.Linear(width, width)
        if what == "module_in_a_list":
            self.held = [nn.Linear(width, width)]
        if what == "unfrozen":
            self.line.bias.requires_grad_(False)

    def body(self, x, numbers):
        match self.what:
            case "module_in_a_list":
                return self.held[0](self.line(x))
            case "made_in_forward":
                if not hasattr(self, "scale"):
                    self.scale = nn.Parameter(torch.full((x.shape[-1],), 0.5))
                return self.line(x) * self.scale
            case "replaced_in_forward":
                if self.training and int(numbers[0]) % 5 == 0:
                    self.line.bias = nn.Parameter(self.line.bias.detach() * 0.5)
            case "unfrozen":
                self.line.bias.requires_grad_(self.training)
        return self.line(x)


_CLASSES = {
    "linear": Linear,
    "branches": Branches,
    "skipped": Skipped,
    "by_sample": BySample,
    "unused": Unused,
    "frozen": Frozen,
    "no_grad": NoGrad,
    "tied_inside": TiedInside,
    "tied_to_first": Linear,
    "twice": Twice,
    "batch_norm": BatchNorm,
    "instance_norm": InstanceNorm,
    "norm": Norm,
    "ema": Ema,
    "counter": Counter,
    "late": Late,
    "derived_buffer": DerivedBuffer,
    "derived_attribute": DerivedAttribute,
    "constant_buffer": ConstantBuffer,
    "shared_buffer": SharedBuffer,
    "weight_norm": WeightNorm,
    "orthogonal": Orthogonal,
    "spectral_norm": SpectralNorm,
    "own_parametrization": OwnParametrization,
    "hooks": Hooks,
    "parameter_hook": ParameterHook,
    "recompute": Recompute,
    "recurrent": Recurrent,
    "attention": Attention,
    "convolution": Convolution,
    "other_dtype": OtherDtype,
    "shapes": Shapes,
    "collections": Collections,
    "dropout": Dropout,
    "lookup": Lookup,
    "borrowed": Borrowed,
    "own_function": OwnFunction,
    "nested_outputs": NestedOutputs,
    "noise": Noise,
    "lazy": Lazy,
    "double_backward": DoubleBackward,
    "inner_list": InnerList,
    "sized_buffer": SizedBuffer,
    "sized_parameter": SizedParameter,
    "written_parameter": WrittenParameter,
    "reached": Reached,
    "carried": Carried,
    "number": Number,
    "hidden": Hidden,
}


def build_piece(kind: str, width: int, options: dict) -> nn.Module:
    return _CLASSES[kind](width, **options)
