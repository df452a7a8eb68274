"""The rate of a scheduler class, torch's or a user's own, as a function of the step.

A scheduler is an object that counts its steps. Here one runs over an optimizer of one number with the rate 1, and what
it makes of that rate is kept for all steps so far. So a job that resumes, shrinks or goes back gets the rate of its
step, and checkpoints have nothing of it. The first call at a late step takes 4 to 20 s per million steps. Called by
`schedule.lr_factor`.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


def scheduler_factor(path: str, args: Mapping[str, Any], step: int) -> float:
    """The factor on the peak rate in the update after `step` updates. ValueError: there is no such scheduler, or it
    cannot be made with these arguments, or its rate is no rate."""
    return _course(path, json.dumps(args, sort_keys=True)).at(step)


@lru_cache(maxsize=4)
def _course(path: str, args: str) -> _Course:
    return _Course(path, json.loads(args))


class _Course:
    def __init__(self, path: str, args: dict[str, Any]) -> None:
        self._path = path
        # With a momentum, since CyclicLR and OneCycleLR change it; here it has no effect.
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0, momentum=0.9)
        kind = _class_of(path)
        try:
            self._scheduler = kind(self._optimizer, **args)
        except Exception as error:
            raise ValueError(f"schedule.args {args}: {path} refuses them: {error}") from None
        self._optimizer.step()  # a scheduler warns if it is stepped before its optimizer has been
        self._factors = [self._rate()]

    def at(self, step: int) -> float:
        while len(self._factors) <= step:
            try:
                self._scheduler.step()
            except Exception as error:
                raise ValueError(
                    f"schedule.name {self._path} has no rate for step {len(self._factors) + 1}: {error}"
                ) from None
            self._factors.append(self._rate())
        return self._factors[step]

    def _rate(self) -> float:
        rate = float(self._optimizer.param_groups[0]["lr"])
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"schedule.name {self._path}: its rate is {rate} times optimizer.lr, which is no rate.")
        return rate


def _class_of(path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"schedule.name {path} cannot be imported here: {error}") from None
    if not (isinstance(found, type) and issubclass(found, LRScheduler)) or issubclass(found, ReduceLROnPlateau):
        raise ValueError(f"schedule.name {path} is not a torch.optim.lr_scheduler.LRScheduler that only counts steps.")
    return found
