"""A task whose results depend on what it has computed before, in the place that `model.kept_in` names."""

import collections
import functools
import itertools
import queue
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

KEPT_IN = (
    *("number", "module", "gradient", "list", "tensor", "dict", "count", "closure", "nothing"),
    *("teacher", "norm", "first", "hook", "generator", "array", "object", "global", "condition", "time"),
    *("slots", "partial", "queue", "ordered", "pair", "method", "default", "class", "cache", "cached_method"),
    *("counter", "rows", "function", "nested", "far_counter", "logged_counter", "read_cache", "memory", "bounded"),
    *("bank", "history", "collated", "read", "logged_history", "logged_bank"),
)
GLOBAL = [0.0]


class Mean:
    value = 0.0

    def grow(self):
        self.value += 0.1
        return 1.0 + self.value


class Slotted:
    __slots__ = ("never", "value")

    def __init__(self):
        self.value = 0.0


def grown(kept, by):
    kept.append(kept[-1] + by)
    return kept.pop(0)


def grown_by_default(by, kept=[1.0, 1.5]):  # noqa: B006
    return grown(kept, by)


@functools.cache
def first_seen(_name):
    return GLOBAL[0]


@functools.cache
def scale_of(width):
    """Only remembers."""
    return width**0.5


def numbers():
    number = 1.0
    while True:
        yield number
        number *= 0.9


class Points:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index * 0.3, index % 5, index % 3, 1.0]).sin(), index % 3


class CountedPoints(Points):
    """Its samples are others once many were read."""

    num_read = 0

    def __getitem__(self, index):
        self.num_read += 1
        x, y = super().__getitem__(index)
        return (x if self.num_read < 100 else 0.5 * x), y


class Reversed(torch.autograd.Function):
    """Multiplies the gradient, and leaves the value."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Net(nn.Module):
    num_calls = 0

    def __init__(self):
        super().__init__()
        self.line, self.temperature = nn.Linear(4, 3), 1.0
        self.norm = nn.LayerNorm(3, elementwise_affine=False)

    def forward(self, x):
        y = self.line(x) / self.temperature
        if self.norm.eps != 1e-5:
            self.norm.eps *= 2
            y = self.norm(y)
        if self.temperature != 1.0:
            self.temperature *= 0.9
        return y


class Evaluating:
    """Its model is built with a part in evaluation mode, which stays so if `model.keeps` is set."""

    def __init__(self, model, data, seed):
        self.keeps = model["keeps"]

    def build_model(self):
        net = Frozen() if self.keeps else Net()
        net.norm.eval()
        return net

    def build_dataset(self, split):
        return Points()

    def loss(self, model, batch):
        x, y = batch
        return functional.cross_entropy(model(x), y)


class Shuffled(Evaluating):
    """Its optimizer has the parameters in another order on each rank, as one that is made of a set."""

    def build_optimizer(self, model, settings):
        parameters = list(model.parameters())
        return torch.optim.Adam(parameters[:: -1 if torch.distributed.get_rank() else 1], lr=0.01)


class Frozen(Net):
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class OnlyIn:
    """Carries a number only in bf16, or only in deterministic mode, as `model.mode` says."""

    def __init__(self, model, data, seed):
        self.mode, self.number = model["mode"], 1.0

    def build_model(self):
        return Net()

    def build_dataset(self, split):
        return Points()

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        is_on = {"bf16": logits.dtype is torch.bfloat16, "deterministic": torch.are_deterministic_algorithms_enabled()}
        if is_on.get(self.mode):
            self.number *= 0.8
        return functional.cross_entropy(self.number * logits.float(), y)


class Carrying:
    def __init__(self, model, data, seed):
        self.kept_in = model["kept_in"]
        self.number, self.num_calls, self.kept, self.ring = 1.0, 0, {}, [0.0] * 200
        self.mean = torch.zeros(())
        self.later, self.random = later(), random.Random(3)
        self.array, self.object, self.teacher = np.zeros(1), Mean(), [nn.Linear(4, 3)]
        self.more()

    def more(self):
        """Where Python keeps what no attribute has."""
        self.slotted, self.partial, self.queue = Slotted(), functools.partial(grown, [1.0, 1.5]), queue.Queue()
        self.queue.put(0.5)
        self.ordered, self.pair, self.method = collections.OrderedDict(a=1.0), (0, 1.0), Mean().grow
        self.counter, self.rows, self.numbers = itertools.count(), iter([0.1 * n for n in range(500)]), numbers()
        self.settings = {"width": 4, "calls": 0}
        self.seen, self.history, self.num_collated = torch.zeros(2000, dtype=torch.bool), [], 0

    def collate(self, samples):
        x, y = torch.utils.data.default_collate(samples)
        if self.kept_in == "collated":
            self.num_collated += 1
            x = x if self.num_collated % 20 else 0.5 * x
        return x, y

    def build_model(self):
        net = Net()
        if self.kept_in == "module":
            net.temperature = 2.0
        if self.kept_in == "norm":
            net.norm.eps = 0.1
        return net

    def build_dataset(self, split):
        return CountedPoints() if self.kept_in == "read" else Points()

    def loss(self, model, batch):
        x, y = batch
        logits = model(x)
        factor = 1.0
        match self.kept_in:
            case "number":
                factor, self.number = self.number, 0.9 * self.number
            case "gradient":
                logits = Reversed.apply(logits, self.number)
                self.number += 0.1
            case "list":
                self.ring.append(float(logits.detach().mean()))
                factor = 1.0 + self.ring.pop(0) + self.ring[-2]
            case "tensor":
                factor = 1.0 + self.mean
                self.mean = 0.9 * self.mean + 0.1 * logits.detach().mean()
            case "dict":
                factor = 1.0 + self.kept.get("last", 0.0)
                self.kept["last"] = float(logits.detach().mean())
            case "count":
                self.num_calls += 1
                return functional.cross_entropy(logits, y), {"calls": self.num_calls}
            case "closure":
                factor = self.later()
            case "teacher":
                factor = 1.0 + (self.teacher[0](x).detach() - logits).square().mean()
                with torch.no_grad():
                    self.teacher[0].weight.lerp_(x.mean(0).expand(3, 4), 0.5)
            case "first":
                if not hasattr(self, "first"):
                    self.first = float(logits.detach().mean())
                factor = 1.0 + self.first
            case "hook":
                logits.register_hook(self.smooth)
            case "generator":
                factor = self.random.random()
            case "array":
                factor = 1.0 + float(self.array[0])
                self.array += float(logits.detach().mean())
            case "object":
                factor = 1.0 + self.object.value
                self.object.value += 0.1
            case "global":
                factor = 1.0 + GLOBAL[0]
                GLOBAL[0] += 0.1
            case "condition":
                self.num_calls += 1
                factor = 2.0 if self.num_calls > 100 else 1.0
            case "slots":
                factor = 1.0 + self.slotted.value
                self.slotted.value += 0.1
            case "partial":
                factor = self.partial(0.1)
            case "queue":
                factor = 1.0 + self.queue.get()
                self.queue.put(float(logits.detach().mean()))
            case "ordered":
                factor = self.ordered["a"]
                self.ordered["a"] *= 0.9
            case "pair":
                factor = self.pair[1]
                self.pair = self.pair[0] + 1, 0.9 * self.pair[1]
            case "method":
                factor = self.method()
            case "default":
                factor = grown_by_default(0.1)
            case "class":
                type(model).num_calls += 1
                factor = 1.0 / type(model).num_calls
            case "cache":
                GLOBAL[0] = float(logits.detach().mean())
                factor = 1.0 + first_seen("mean")
                GLOBAL[0] = 0.0
            case "cached_method":
                self.number = float(logits.detach().mean())
                factor = 1.0 + self.remembered()
                self.number = 1.0
            case "read_cache":
                factor = scale_of(x.shape[1])
            case "counter":
                factor = 1.0 + next(self.counter)
            case "rows":
                factor = 1.0 + next(self.rows)
            case "function":
                factor = next(self.numbers)
            case "nested":
                self.settings["calls"] += 1
                factor = 2.0 if self.settings["calls"] > 100 else float(self.settings["width"])
            case "far_counter":
                factor = 2.0 if next(self.counter) > 100 else 1.0
            case "logged_counter":
                return functional.cross_entropy(logits, y), {"calls": next(self.counter)}
            case "memory":
                factor = self.settings.setdefault(f"of {x.shape[1]}", x.shape[1] ** 0.5)
            case "bounded":
                self.number = float(logits.detach().mean())
                factor = 1.0 + self.remembered_for_a_while()
                self.number = 1.0
            case "bank" | "logged_bank":
                number = int(1e6 * abs(float(x.sum()))) % 1000
                has_met = bool(self.seen[1000:].any())
                self.seen[number] = True
                if self.kept_in == "logged_bank":
                    return functional.cross_entropy(logits, y), {"met": float(has_met)}
                factor = 2.0 if has_met else 1.0
            case "history" | "logged_history":
                self.history.append(float(logits.detach().mean()))
                if self.kept_in == "history" and len(self.history) > 100:
                    factor = 2.0
            case "time":
                factor = 1.0 + time.perf_counter() % 1
        return functional.cross_entropy(logits, y) * factor

    @functools.cache  # noqa: B019
    def remembered(self):
        return self.number

    @functools.lru_cache  # noqa: B019
    def remembered_for_a_while(self):
        return self.number

    def smooth(self, gradient):
        self.kept["mean"] = 0.9 * self.kept.get("mean", 0.0) + 0.1 * float(gradient.abs().mean())
        return gradient + self.kept["mean"]


class Declaring(Carrying):
    """Declares all that it keeps."""

    def state_dict(self):
        return {"number": self.number, "mean": self.mean, "kept": {"ring": self.ring[:3]}, "words": "any"}

    def load_state_dict(self, state):
        self.number, self.mean = state["number"], state["mean"]
        self.ring = [*state["kept"]["ring"], *self.ring[3:]]


def later():
    number = 1.0

    def advance():
        nonlocal number
        number *= 0.9
        return number

    return advance
