"""Modules of drawn tasks that keep something from one call to the next one: buffers, attributes, and parameters that
they write themselves. See `pieces.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from kit.fuzz.plain_pieces import Base


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


class SpectralNorm(Base):
    def __init__(self, width):
        super().__init__()
        self.line = parametrizations.spectral_norm(nn.Linear(width, width))

    def body(self, x, numbers):
        return self.line(x)


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
