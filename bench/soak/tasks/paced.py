"""The built-in language model, slowed down, so that the reference run of a soak takes less time than the soak.

It sleeps `data.pace_s` seconds at every micro-batch; the losses do not depend on it.
"""

import time

from shoal_workers.tasks.lm import LanguageModel


class PacedLanguageModel(LanguageModel):
    def __init__(self, *, model, data, seed):
        data = dict(data)
        self._pace_s = data.pop("pace_s", 0.0)
        super().__init__(model=model, data=data, seed=seed)

    def loss(self, model, batch):
        time.sleep(self._pace_s)
        return super().loss(model, batch)
