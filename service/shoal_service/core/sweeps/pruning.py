"""The median rule (Golovin et al. 2017, "Google Vizier", section 3.2.2): a job of a sweep that is worse than half of
the others at the same step is ended.

The step is the last one that the job and at least two others have reached, so a job that is ahead is compared as soon
as others follow, and one that runs after others have ended is compared from the end of its warm-up. With fewer than two
others nothing is decided: the median of one value is that value, and the rule would be a duel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_high

LEAST_OTHERS = 2
AVERAGED_STEPS = 8
"""A training loss is the mean of this many steps, since that of one step depends on its batch."""


class Measure(StrEnum):
    """What is compared."""

    VALIDATION = "validation loss"
    TRAINING = "training loss"


@dataclass(frozen=True, slots=True)
class Rule:
    """What decides whether one job is pruned."""

    measure: Measure
    every_steps: int
    """Steps at which the job has values: those of its validations, or AVERAGED_STEPS."""
    warmup_steps: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job is worse than the median of the others."""

    step: int
    value: float
    """NaN counts as worse than every number."""
    median: float
    num_others: int


def rule_of(every_steps: int | None, warmup_steps: int) -> Rule:
    """`every_steps`: between two validations; None: there is none under way."""
    if every_steps is None:
        return Rule(Measure.TRAINING, AVERAGED_STEPS, warmup_steps)
    return Rule(Measure.VALIDATION, every_steps, warmup_steps)


def step_to_compare(job_id: str, reached: Mapping[str, int], rule: Rule) -> int | None:
    """`reached`: the last step of each job of the sweep for which it has a value of this measure. None: no step can be
    compared yet."""
    others = sorted((step for other, step in reached.items() if other != job_id), reverse=True)
    if len(others) < LEAST_OTHERS or job_id not in reached:
        return None
    bound = min(reached[job_id], others[LEAST_OTHERS - 1])
    step = bound - bound % rule.every_steps
    return step if step >= max(1, rule.warmup_steps) else None


def verdict(job_id: str, step: int, values: Mapping[str, float]) -> Verdict | None:
    """`values`: of the jobs that have one at this step, smaller ones are better. None: the job goes on."""
    others = [_or_worst(value) for other, value in values.items() if other != job_id]
    if job_id not in values or len(others) < LEAST_OTHERS:
        return None
    middle = median_high(others)  # of an even number the larger one: at most half of the jobs are ended
    if _or_worst(values[job_id]) <= middle:
        return None
    return Verdict(step, values[job_id], middle, len(others))


def rank(val_loss: float | None, loss: float | None) -> tuple[bool, float]:
    """To sort the jobs of a sweep, the best first: by validation loss, where there is one; then by loss; then those
    that have neither."""
    value = val_loss if val_loss is not None else loss
    return value is None, _or_worst(value) if value is not None else 0.0


def _or_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
