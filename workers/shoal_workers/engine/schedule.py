"""Derive from the spec how many steps a run has, the learning rate of each, and whether something is due after it.

Functions of the spec, the step and the size of the data, never of the time or the world size. A learning rate that
depends on the step alone needs no scheduler object and no state in the checkpoint, and is right after any resize or
rollback.
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


def count_total_steps(stop: StopSpec, *, global_size: int, num_samples: int, tokens_per_sample: int) -> int:
    """Return the optimizer steps of the whole run; tokens and epochs are rounded up to whole steps.

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
    """Return True if what happens every `every_steps` steps happens after step `step`; None means never."""
    return every_steps is not None and step % every_steps == 0


def compute_lr_factor(schedule: ScheduleSpec, step: int, total_steps: int) -> float:
    """Return the factor on the peak learning rate in the update from `step` completed steps to `step` + 1.

    Warm-up reaches 1.0 in update number `warmup_steps`. The decay reaches `min_lr_ratio` in the last update, or in
    update number `schedule.steps`, and stays there; inverse_sqrt and step only never fall below it. A scheduler class
    begins after the warm-up.

    Raises:
        ValueError: the scheduler class cannot be made with the user's arguments, or has no rate for the step.
    """
    if schedule.is_path:
        warmup = schedule.warmup_steps
        return (step + 1) / warmup if step < warmup else _read_scheduler(schedule.name, schedule.args, step - warmup)
    total_steps = schedule.steps if schedule.steps is not None else total_steps
    warmup, lowest = schedule.warmup_steps, schedule.min_lr_ratio
    if step < warmup:
        if schedule.name == "one_cycle":
            done = 1.0 - _half_cosine(step / (warmup - 1)) if warmup > 1 else 1.0
            return _ONE_CYCLE_START + (1.0 - _ONE_CYCLE_START) * done
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
            remaining = _half_cosine(done)
    return lowest + (1.0 - lowest) * remaining


_ONE_CYCLE_START = 1 / 25
"""First factor of one_cycle, as in torch's OneCycleLR."""


def _half_cosine(done: float) -> float:
    """Return a factor that falls from 1 to 0 along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _read_scheduler(path: str, args: Mapping[str, Any], step: int) -> float:
    """Return the factor on the peak rate in the update after `step` updates of a scheduler class.

    Raises:
        ValueError: there is no such class, it refuses these arguments, or its rate is not a finite number >= 0.
    """
    return _load_rates(path, json.dumps(args, sort_keys=True)).find_factor(step)


@lru_cache(maxsize=4)
def _load_rates(path: str, args: str) -> _SchedulerRates:
    return _SchedulerRates(path, json.loads(args))


class _SchedulerRates:
    """The rates of a scheduler class, torch's or a user's, as a function of the step.

    A scheduler counts its steps. Here it steps an optimizer of one number with the rate 1, and the rates of all steps
    so far stay in memory. So a job that resumes, shrinks or rolls back gets the rate of its step, without a state in
    the checkpoint. The first call at a late step takes 4 to 20 s per million steps.
    """

    def __init__(self, path: str, args: dict[str, Any]) -> None:
        self._path = path
        # With a momentum, since CyclicLR and OneCycleLR change it; here it has no effect.
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0, momentum=0.9)
        scheduler_class = _import_scheduler(path)
        try:
            self._scheduler = scheduler_class(self._optimizer, **args)
        except Exception as error:
            raise ValueError(f"schedule.args {args}: {path} refuses them: {error}") from None
        self._optimizer.step()  # a scheduler warns if it is stepped before its optimizer has been
        self._factors = [self._read_rate()]

    def find_factor(self, step: int) -> float:
        while len(self._factors) <= step:
            try:
                self._scheduler.step()
            except Exception as error:
                raise ValueError(
                    f"schedule.name {self._path} has no rate for step {len(self._factors) + 1}: {error}"
                ) from None
            self._factors.append(self._read_rate())
        return self._factors[step]

    def _read_rate(self) -> float:
        rate = float(self._optimizer.param_groups[0]["lr"])
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"schedule.name {self._path}: its rate is {rate} times optimizer.lr, which is no rate.")
        return rate


def _import_scheduler(path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        scheduler_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"schedule.name {path} cannot be imported here: {error}") from None
    if not (isinstance(scheduler_class, type) and issubclass(scheduler_class, LRScheduler)) or issubclass(
        scheduler_class, ReduceLROnPlateau
    ):
        raise ValueError(f"schedule.name {path} is not a torch.optim.lr_scheduler.LRScheduler that only counts steps.")
    return scheduler_class
