"""Optimizers with groups that depend on the whole model: by position, and by name."""

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
