"""Which jobs of a sweep are ended early, because others are better at the same step. Pure.

    median    worse than the median of the others ("Google Vizier", Golovin et al. 2017, section 3.2.2)
    halving   not among the best 1 / reduction at a rung (asynchronous successive halving, Li et al. 2020)

The control loop asks in each of its looks, for each running job: `step_to_compare` names the step, the store reads the
values there, `verdict` decides. Both are functions of what is stored, so a control plane that was restarted decides
the same, and a job that was ended is not asked about again.

Median: the step is the last one that the job and at least two others have reached, so a job that is ahead is compared
as soon as others follow, and one that runs after others have ended is compared from the end of its warm-up. With fewer
than two others nothing is decided: the median of one value is that value, and the rule would be a duel.

Halving: the rungs are the steps warm-up x reduction^k, each rounded up to a step at which there is a value.

    step        20            60                         180          warm-up 20, reduction 3
    9 jobs -----|-- 3 jobs ---|------ 1 job -------------|------

A job is judged at the highest rung that it has reached, against every job that has reached it, the ended ones too. It
is judged as soon as `reduction` jobs have, and again as others arrive: a job that was let through early, among few, is
ended by the better ones that come after it, unless it has reached a higher rung meanwhile. No job waits for others.
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


class Method(StrEnum):
    """The values of `sweep.prune`."""

    MEDIAN = "median"
    HALVING = "halving"


@dataclass(frozen=True, slots=True)
class Rule:
    """What decides whether one job is pruned."""

    measure: Measure
    every_steps: int
    """Steps at which the job has values: those of its validations, or AVERAGED_STEPS."""
    warmup_steps: int
    method: Method = Method.MEDIAN
    reduction: int = 3
    """N of halving: one job in N passes a rung."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job is ended, with the numbers that decided it."""

    step: int
    value: float
    """NaN counts as worse than every number."""
    median: float
    """The largest loss with which the job would have gone on: the median of the others, or that of the worst job that
    passes the rung."""
    num_others: int
    num_kept: int | None = None
    """The number, in halving, of jobs that pass the rung."""


def rule_of(every_steps: int | None, warmup_steps: int, method: Method = Method.MEDIAN, reduction: int = 3) -> Rule:
    """`every_steps`: between two validations; None if there is none under way."""
    if every_steps is None:
        return Rule(Measure.TRAINING, AVERAGED_STEPS, warmup_steps, method, reduction)
    return Rule(Measure.VALIDATION, every_steps, warmup_steps, method, reduction)


def step_to_compare(job_id: str, reached: Mapping[str, int], rule: Rule) -> int | None:
    """`reached`: the last step of each job of the sweep for which it has a value of this measure. None if no step can
    be compared yet."""
    if job_id not in reached:
        return None
    if rule.method is Method.HALVING:
        return _rung(reached[job_id], rule)
    others = sorted((step for other, step in reached.items() if other != job_id), reverse=True)
    if len(others) < LEAST_OTHERS:
        return None
    bound = min(reached[job_id], others[LEAST_OTHERS - 1])
    step = bound - bound % rule.every_steps
    return step if step >= max(1, rule.warmup_steps) else None


def verdict(job_id: str, step: int, values: Mapping[str, float], rule: Rule) -> Verdict | None:
    """`values`: of the jobs that have one at this step, smaller ones are better. None if the job goes on."""
    if job_id not in values:
        return None
    others = [_or_worst(value) for other, value in values.items() if other != job_id]
    mine, kept = _or_worst(values[job_id]), None
    if rule.method is Method.HALVING:
        if len(values) < rule.reduction:
            return None
        kept = -(-len(values) // rule.reduction)
        bound = sorted([*others, mine])[kept - 1]
    elif len(others) < LEAST_OTHERS:
        return None
    else:
        bound = median_high(others)  # of an even number the larger one: at most half of the jobs are ended
    return Verdict(step, values[job_id], bound, len(others), kept) if mine > bound else None


def _rung(reached: int, rule: Rule) -> int | None:
    """The highest rung up to this step; None if the job is below the first one."""
    passed_rung, wanted = None, max(1, rule.warmup_steps)
    while (rung := -(-wanted // rule.every_steps) * rule.every_steps) <= reached:
        passed_rung, wanted = rung, wanted * rule.reduction
    return passed_rung


def _or_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
