"""Optimizers with groups that depend on the whole model: by position, by name, and by attributes of parameters."""

import torch
from metered_tasks import Steps
from tiny_tasks import Counting


class Grouped(Counting):
    """The first half of the parameters and those of the head have rates of their own."""

    def build_model(self):
        return Steps(29, 24, 4)

    def build_optimizer(self, model, settings):
        named = list(model.named_parameters())
        head = [parameter for name, parameter in named if name.startswith("head")]
        others = [parameter for name, parameter in named if not name.startswith("head")]
        half = len(others) // 2
        rates = {2.0: others[:half], 0.5: others[half:], 0.1: head}
        groups = [{"params": own, "lr": settings["lr"] * rate} for rate, own in rates.items()]
        return torch.optim.SGD(groups, lr=settings["lr"], momentum=0.9)


class FirstHalfFrozen(Grouped):
    """The first stage of two has nothing to train."""

    def build_model(self):
        model = super().build_model()
        for part in (model.embed, *model.blocks[:2]):
            part.requires_grad_(False)
        return model

    def build_optimizer(self, model, settings):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=settings["lr"], momentum=0.9)


class Scaled(torch.optim.Optimizer):
    """Reads attributes of parameters in each step."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(parameter.grad, alpha=group["lr"] * getattr(parameter, "lr_scale", 1.0))


class Attributed(Counting):
    """The model says of its parameters whether they decay, and by what their rate is multiplied."""

    def build_model(self):
        model = Steps(29, 24, 4)
        for parameter in model.parameters():
            parameter._no_weight_decay = parameter.ndim < 2
            parameter.lr_scale = 0.2 if parameter.ndim < 2 else 1.0
        return model

    def build_optimizer(self, model, settings):
        by_decay = {0.0: [], 0.5: []}
        for parameter in model.parameters():
            by_decay[0.0 if getattr(parameter, "_no_weight_decay", False) else 0.5].append(parameter)
        groups = [{"params": own, "weight_decay": decay} for decay, own in by_decay.items() if own]
        return Scaled(groups, settings["lr"])
