"""A task whose `model` names the settings of its optimizer, and one that changes a setting while it trains."""

import torch
from late_tasks import Late


class Tuned(Late):
    """`model`: the kind of optimizer, its settings, and whether biases have a group of their own."""

    def build_optimizer(self, model, settings):
        kind, options = self.model["kind"], self.model["options"]
        biases = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": biases, "weight_decay": 0.0}]
        parameters = groups if self.model.get("groups") else model.parameters()
        self.optimizer = getattr(torch.optim, kind)(parameters, lr=settings["lr"], **options)
        return self.optimizer


class TunedElementwise(Tuned):
    elementwise_optimizer = True


class Mutating(Tuned):
    """In the third step it changes the weight decay, and nothing tells it to do so again."""

    def loss(self, model, batch):
        if int(batch[0, 0]) == 2 and hasattr(self, "optimizer"):
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.5
        return super().loss(model, batch)
