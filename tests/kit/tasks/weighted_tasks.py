"""Tasks whose loss is a sum over tokens, with the number of tokens as its weight; they import nothing from Shoal."""

import itertools

import torch
from metered_tasks import Steps
from tiny_tasks import Counting
from torch.nn import functional as F


class Uneven(Counting):
    """Samples of 0 to 8 tokens that count; each counts `model.factor` times."""

    def loss(self, model, batch):
        labels = batch[:, 1:]
        counts = torch.arange(labels.shape[1], device=labels.device) < batch[:, :1] % 9
        logits = model(batch[:, :-1])
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        total, num = (each * counts).sum(), counts.sum()
        hits = ((logits.argmax(-1) == labels) & counts).sum() / num  # nan without any token
        factor = self.model.get("factor", 1)
        return total * factor, num * factor, {"accuracy": hits, "same": total.detach() / num}


class StagedUneven(Uneven):
    """Its model can be divided into the stages of a pipeline."""

    def build_model(self):
        return Steps(29, 24, 4)


class Wayward(Uneven):
    """What it returns is wrong in the way that `model.way` names."""

    calls = 0
    ways = itertools.cycle((True, False, False))
    """Not a number: of one that changes a loss the first trial of the task would say it."""

    def loss(self, model, batch):
        self.calls += 1
        total, num, _ = super().loss(model, batch)
        match self.model["way"]:
            case "mixed":
                return (total, num) if next(self.ways) else total / num
            case "rank":
                return (total, num) if torch.distributed.get_rank() == 0 else total / num
            case "negative":
                return total, -1 - num
            case "nothing":
                return total, num * (self.calls not in self.model["calls"])
            case "validation":
                return total, num * model.training
