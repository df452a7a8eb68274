"""The optimizer of a spec in plain torch, over a whole model: nothing of the engine's optimizers or groups is used."""

import re

import torch
from torch import nn


def plain_optimizer(settings, model):
    """`settings`: the section `optimizer` of a spec. Freezes what it says is frozen."""
    own, names = {}, dict(model.named_parameters())
    for name, parameter in names.items():
        own[name] = next((one for one in settings.groups if _matches(one.match, name)), None)
        if own[name] is not None and own[name].frozen:
            parameter.requires_grad_(False)
    groups = []
    for name, parameter in names.items():
        if not parameter.requires_grad:
            continue
        group = own[name]
        rate, decay = settings.lr, settings.weight_decay if parameter.ndim >= 2 else 0.0
        if group is not None and (group.lr or group.lr_factor):
            rate = group.lr or settings.lr * group.lr_factor
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        groups.append((name, group, {"params": [parameter], "lr": rate, "weight_decay": decay}))
    args = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.args.items()}
    betas = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if settings.name == "muon":
        return _Both(model, groups, args, betas)
    plain = [group for _, _, group in groups]
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(plain, **betas)
        case "adam":
            return torch.optim.Adam(plain, **betas, **args)
        case "lion":
            return Lion(plain, **args)
        case "sgd" | "adagrad" | "rmsprop" | "adafactor" as name:
            kind = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop", "adafactor": "Adafactor"}[name]
            return getattr(torch.optim, kind)(plain, **args)
        case path:
            return getattr(torch.optim, path.rpartition(".")[2])(plain, **args)


class Lion(torch.optim.Optimizer):
    """The authors' own order of operations (google/automl, lion_pytorch.py)."""

    def __init__(self, params, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": 1e-4, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (one for one in group["params"] if one.grad is not None):
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class _Both(torch.optim.Optimizer):
    """Two optimizers of torch, one after the other: the schedule sees all of their groups."""

    def __init__(self, model, groups, args, betas):
        embeddings = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        matrices, others = [], []
        for _, group, own in groups:
            (parameter,) = own["params"]
            allowed = id(parameter) not in embeddings if group is None or group.muon is None else group.muon
            (matrices if parameter.ndim == 2 and allowed else others).append(own)
        self.both = [
            torch.optim.Muon(matrices, **{"adjust_lr_fn": "match_rms_adamw", **args}),
            torch.optim.AdamW(others, **betas),
        ]
        super().__init__([nn.Parameter(torch.zeros(1))], {"lr": 0.0})
        self.param_groups = [group for one in self.both for group in one.param_groups]

    def step(self, closure=None):
        for one in self.both:
            one.step()


def _matches(pattern, name):
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), name) is not None
