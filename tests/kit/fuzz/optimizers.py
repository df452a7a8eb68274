"""The optimizers of drawn tasks: those of torch.optim, and some of a user's own. Every own one is a class of a module,
as `elementwise_optimizer` asks for."""

from __future__ import annotations

import torch
from torch import nn

ELEMENTWISE = ("own_damped",)
"""Those that a task may declare so."""


def build_optimizer(kind: str, options: dict, groups: list[dict], lr: float) -> torch.optim.Optimizer:
    options = {name: value for name, value in options.items() if name != "declared"}
    match kind:
        case "sgd":
            if not options["momentum"]:
                options["nesterov"] = False
            return torch.optim.SGD(groups, lr=lr, **options)
        case "adam":
            return torch.optim.Adam(groups, lr=lr, eps=1e-3, **options)
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, eps=1e-3, **options)
        case "nadam":
            return torch.optim.NAdam(groups, lr=lr, eps=1e-3)
        case "radam":
            return torch.optim.RAdam(groups, lr=lr, eps=1e-3)
        case "adamax":
            return torch.optim.Adamax(groups, lr=lr, eps=1e-3)
        case "adadelta":
            return torch.optim.Adadelta(groups, lr=lr, eps=1e-3)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=lr, eps=1e-2, **options)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=lr, eps=1e-2, **options)
        case "rprop":
            return torch.optim.Rprop(groups, lr=lr)
        case "asgd":
            return torch.optim.ASGD(groups, lr=lr, t0=3)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=lr)
        case "muon":
            return torch.optim.Muon([p for group in groups for p in group["params"] if p.ndim == 2], lr=lr)
        case "lbfgs":
            return torch.optim.LBFGS([p for group in groups for p in group["params"]], lr=lr)
        case "own_damped":
            return Damped(groups, lr=lr)
        case "own_whole":
            return Whole(groups, lr=lr)
        case "own_group_state":
            return GroupState(groups, lr=lr)
        case "own_late_state":
            return LateState(groups, lr=lr)
        case "own_scaled":
            return Scaled(groups, lr=lr)
        case "own_noisy":
            return Noisy(groups, lr=lr)
        case "own_anchored":
            return Anchored(groups, lr=lr)
        case "own_number":
            return ByNumber(groups, lr=lr)
        case "own_keeping":
            return _keeping(groups, lr, options["in"])
    raise ValueError(kind)


class Damped(torch.optim.Optimizer):
    """Bounded steps along a moving average, element by element; the rate falls with each update."""

    def __init__(self, params, lr, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=torch.zeros(()), average=torch.zeros_like(parameter))
                state["step"] += 1
                state["average"].lerp_(parameter.grad, 1 - group["decay"])
                direction = state["average"] / (state["average"].abs() + 0.1)
                parameter.add_(direction, alpha=-group["lr"] / (1 + 0.1 * float(state["step"])))


class Whole(torch.optim.Optimizer):
    """Each tensor's gradient is divided by its own norm: it needs whole tensors."""

    def __init__(self, params, lr, decay=0.5):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                state["average"].mul_(group["decay"]).add_(parameter.grad)
                norm = state["average"].norm()
                parameter.add_(state["average"] / (norm + 0.1), alpha=-group["lr"])


class GroupState(torch.optim.Optimizer):
    """Counts its updates in the group, as some do, and decays its rate by them."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "updates": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["updates"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["updates"] ** 0.5)


class LateState(torch.optim.Optimizer):
    """Has state from its third update on, and then a number beside a tensor."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                if state["step"] == 3:
                    state["anchor"] = parameter.clone()
                parameter.add_(parameter.grad, alpha=-group["lr"])
                if "anchor" in state:
                    parameter.lerp_(state["anchor"], 0.1)


class Scaled(torch.optim.Optimizer):
    """Scales the rate of a parameter by its attribute."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = 0.25 if getattr(parameter, "is_slow", False) else 1.0
                    parameter.add_(parameter.grad, alpha=-group["lr"] * scale)


class Noisy(torch.optim.SGD):
    """Adds noise to the parameters, as Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in _parameters(self):
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


class Anchored(torch.optim.SGD):
    """Draws the parameters to their first values, which its constructor copies."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.anchors = [parameter.detach().clone() for parameter in _parameters(self)]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, anchor in zip(_parameters(self), self.anchors, strict=True):
            if parameter.grad is not None:
                parameter.grad = parameter.grad + 0.5 * (parameter - anchor)
        super().step()


class ByNumber(torch.optim.Optimizer):
    """Divides by an average of a norm over all parameters, as a number in each group and one beside them."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "mean": 1.0})
        self.least = float("inf")

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            with_gradient = [one for one in group["params"] if one.grad is not None]
            square = sum(float(one.grad.abs().square().sum()) for one in with_gradient)
            group["mean"] = 0.5 * group["mean"] + 0.5 * square
            self.least = min(self.least, 10.0 + square)
            for one in with_gradient:
                one.add_(one.grad, alpha=-group["lr"] / (1 + group["mean"]) / self.least)


class Keeping(torch.optim.SGD):
    """Its rate falls, by something that it keeps."""

    def __init__(self, params, lr, keep):
        super().__init__(params, lr=lr)
        self.keep = keep

    @torch.no_grad()
    def step(self, closure=None):
        factor = self.keep(self)
        for parameter in _parameters(self):
            if parameter.grad is not None:
                parameter.grad = parameter.grad * factor
        super().step()


def _keeping(groups, lr, place):
    generator, numbers, inner = torch.Generator().manual_seed(1), {"n": 0}, torch.optim.SGD([torch.zeros(1)], lr=lr)

    def count(entries):
        entries["n"] = entries.get("n", 0) + 1
        return 1 / entries["n"]

    def average(optimizer):
        optimizer.average = 0.5 * getattr(optimizer, "average", torch.ones(2)) + 0.1
        return float(optimizer.average[0])

    keeps = {
        "attribute": average,
        "dict": lambda _: count(numbers),
        "generator": lambda _: float(torch.rand((), generator=generator)),
        "inner": lambda _: count(inner.state),
        "state": lambda optimizer: count(optimizer.state.setdefault("all", {})),
        "group": lambda optimizer: count(optimizer.param_groups[0].setdefault("numbers", {})),
        "hook": lambda _: 1 / (1 + numbers["n"]),
    }
    optimizer = Keeping(groups, lr, keeps[place])
    if place == "hook":
        optimizer.register_step_post_hook(lambda *_: numbers.update(n=numbers["n"] + 1))
    return optimizer


def _parameters(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def grouped(model: nn.Module, groups: str, lr: float) -> list[dict]:
    """The trainable parameters of a model in one or two groups; the second has another rate."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    match groups:
        case "two":
            first, second = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        case "by_dim":
            first, second = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
        case "by_attribute":
            first, second = ([p for p in parameters if getattr(p, "is_slow", False) is slow] for slow in (False, True))
        case _:
            first, second = parameters, []
    return [{"params": own, "lr": rate} for own, rate in ((first, lr), (second, lr / 2)) if own]
