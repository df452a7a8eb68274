"""The built-in task, whose weights every worker draws whole: what `deferred_init` saves."""

from __future__ import annotations

from shoal_workers.tasks.lm import LanguageModel


class WholeLM(LanguageModel):
    deferred_init = False
