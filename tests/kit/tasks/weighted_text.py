"""The built-in language model with a loss over some of the tokens, which can be split along every axis."""

import torch
from torch.nn import functional as F

from shoal_workers.tasks.lm import LanguageModel


class WeightedText(LanguageModel):
    """As many tokens of a sample count as its first token says: between none and all."""

    def loss(self, model, batch):
        labels, logits = batch["labels"], model(batch["tokens"], batch["positions"])
        places = torch.arange(labels.shape[1], device=labels.device)
        labels = labels.where(places < batch["tokens"][:, :1] % labels.shape[1], -100)
        total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        num = (labels != -100).sum()
        return total, num, {"same": total.detach() / num}
