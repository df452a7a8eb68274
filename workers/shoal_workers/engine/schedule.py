"""What each step number means for a run: how many there are, their learning rates, and which of them save or validate.

Pure functions of the spec, the step and the size of the data. A rate that depends on the step alone needs no scheduler
object and no state in the checkpoint, and is right after any resize or rollback. Never depends on wall-clock time or on
the world size. Called by the trainer and the checks of its ranks.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal_workers.contract.schedules import ScheduleSpec
from shoal_workers.contract.spec import StopSpec


def total_steps(stop: StopSpec, *, global_size: int, num_samples: int, tokens_per_sample: int) -> int:
    """Optimizer steps of the whole run; tokens and epochs are rounded up to whole steps.

    Args:
        global_size: samples per step.
        num_samples: length of the training split.
        tokens_per_sample: 1 for a task without tokens, whose `stop.tokens` counts samples.
    """
    if stop.steps is not None:
        return stop.steps
    if stop.tokens is not None:
        return math.ceil(Fraction(stop.tokens, global_size * tokens_per_sample))
    assert stop.epochs is not None, "StopSpec holds exactly one of the three"
    # through the decimal spelling: 0.1 epochs of 30 samples are 3 samples, not 3.0000000000000001 and one step more
    return math.ceil(Fraction(repr(stop.epochs)) * num_samples / global_size)


def is_due(step: int, every_steps: int | None) -> bool:
    """Return whether something that happens every `every_steps` completed steps happens after step number `step`."""
    return every_steps is not None and step % every_steps == 0


def lr_factor(schedule: ScheduleSpec, step: int, total_steps: int) -> float:
    """The factor on the peak learning rate in the update from `step` completed steps to `step` + 1.

    Warm-up reaches 1.0 in update number `warmup_steps`; the decay reaches `min_lr_ratio` in the last update, or in
    update number `schedule.steps`, and stays there. inverse_sqrt and step fall without an aim, and not below it. A
    scheduler class begins after the warm-up; ValueError, for the user, if it cannot be made.
    """
    if schedule.is_path:
        warmup = schedule.warmup_steps
        return (step + 1) / warmup if step < warmup else scheduler_factor(schedule.name, schedule.args, step - warmup)
    total_steps = schedule.steps if schedule.steps is not None else total_steps
    warmup, lowest = schedule.warmup_steps, schedule.min_lr_ratio
    if step < warmup:
        if schedule.name == "one_cycle":
            risen = 1.0 - _cosine(step / (warmup - 1)) if warmup > 1 else 1.0
            return _FIRST_OF_CYCLE + (1.0 - _FIRST_OF_CYCLE) * risen
        return (step + 1) / warmup
    match schedule.name:
        case "constant":
            return 1.0
        case "inverse_sqrt":
            return max(lowest, math.sqrt(max(1, warmup) / (step + 1)))
        case "step":
            assert schedule.every_steps is not None, "ScheduleSpec has it for this name"
            return max(lowest, schedule.factor ** ((step - warmup) // schedule.every_steps))
    decay_steps = total_steps - warmup
    if decay_steps <= 0:
        return 1.0
    if schedule.name == "wsd":
        decay_steps = min(decay_steps, schedule.decay_steps or math.ceil(total_steps / 5))
    done = min(1.0, max(0.0, (step + 1 - (total_steps - decay_steps)) / decay_steps))
    match schedule.name:
        case "linear" | "wsd":
            remaining = 1.0 - done
        case "polynomial":
            remaining = (1.0 - done) ** (2.0 if schedule.power is None else schedule.power)
        case "cosine" | "one_cycle":
            remaining = _cosine(done)
    return lowest + (1.0 - lowest) * remaining


_FIRST_OF_CYCLE = 1 / 25
"""As torch's OneCycleLR."""


def _cosine(done: float) -> float:
    """Falls from 1 to 0 along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


def scheduler_factor(path: str, args: Mapping[str, Any], step: int) -> float:
    """The factor on the peak rate in the update after `step` updates. ValueError: there is no such scheduler, or it
    cannot be made with these arguments, or its rate is no rate."""
    return _course(path, json.dumps(args, sort_keys=True)).at(step)


@lru_cache(maxsize=4)
def _course(path: str, args: str) -> _Course:
    return _Course(path, json.loads(args))


class _Course:
    """The rates of a scheduler class, torch's or a user's, as a function of the step.

    A scheduler counts its steps. Here it runs over an optimizer of one number with the rate 1, and the rates of all
    steps so far are kept, so a job that resumes, shrinks or goes back gets the rate of its step, and checkpoints have
    nothing of it. The first call at a late step takes 4 to 20 s per million steps.
    """

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
        schedule_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"schedule.name {path} cannot be imported here: {error}") from None
    if not (isinstance(schedule_class, type) and issubclass(schedule_class, LRScheduler)) or issubclass(
        schedule_class, ReduceLROnPlateau
    ):
        raise ValueError(f"schedule.name {path} is not a torch.optim.lr_scheduler.LRScheduler that only counts steps.")
    return schedule_class
