"""The built-in language model, as if an accelerator computed for `model.pace_s` seconds in each micro-batch."""

import time

import torch

from shoal_workers.tasks.lm import LanguageModel


class PacedText(LanguageModel):
    def __init__(self, model, data, seed):
        self.pace_s = model["pace_s"]
        super().__init__({name: value for name, value in model.items() if name != "pace_s"}, data, seed)

    def loss(self, model, batch):
        if torch.is_grad_enabled():  # not in a validation
            time.sleep(self.pace_s)
        return super().loss(model, batch)
