"""Sweeps: chooses the values that their jobs try, and the jobs that are ended early. Pure.

`optimizer.lr=1e-4,3e-4` and other axes make one set of values for each job, as every combination or drawn at random.
A value is YAML, as in `--set`. Commas inside brackets, braces and quotes do not separate values.

A draw depends only on the seed, the number of the draw and the key. So a request that is repeated has the same jobs,
and one with more samples continues the sweep. The limit of a sweep is a rule of the scheduler, in `core/scheduling`.

A job is ended early because others are better at the same step:

    median    worse than the median of the others ("Google Vizier", Golovin et al. 2017, section 3.2.2)
    halving   not among the best 1 / reduction at a rung (asynchronous successive halving, Li et al. 2020)

For each running job `step_to_compare` returns the step, the store reads the values there, and `verdict` decides. Both
are functions of what is stored, so a control plane that was restarted decides the same.

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

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from random import Random
from statistics import median_high
from typing import Any

from shoal_service.core.key_paths import NotASection, assign

MAX_JOBS = 1_000
_DRAWS_PER_SAMPLE = 100
"""Draws that are tried for each job, since draws from few values repeat."""
_NOT_OF_A_GRID = {
    "name": "the jobs are numbered",
    "sweep": "all jobs are of this one",
    "project": "a sweep is of one project",
}
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "'\""


class InvalidGrid(ValueError):
    """The message names the axis and the form."""


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """Return KEY.PATH and the texts of its values. Raises InvalidGrid."""
    key, equals, values = text.partition("=")
    texts = tuple(value.strip() for value in _split(values))
    if not key.strip() or not equals or not all(texts) or not texts:
        raise InvalidGrid(f"--grid {text!r}: use KEY.PATH=VALUE,VALUE,..., for example optimizer.lr=1e-4,3e-4.")
    if len(set(texts)) < len(texts):
        raise InvalidGrid(f"--grid {text!r}: a value is given twice.")
    return key.strip(), texts


def combine(axes: Sequence[tuple[str, tuple[str, ...]]]) -> list[dict[str, str]]:
    """Return every combination, by key path; the last axis changes fastest. Raises InvalidGrid."""
    keys = [key for key, _ in axes]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise InvalidGrid(f"--grid names {', '.join(sorted(twice))} twice: give all of its values in one --grid.")
    number = math.prod(len(values) for _, values in axes)
    if number > MAX_JOBS:
        raise InvalidGrid(
            f"The grid has {number:,} combinations, and a sweep at most {MAX_JOBS:,} jobs: leave some out."
        )
    return [dict(zip(keys, chosen, strict=True)) for chosen in product(*(values for _, values in axes))]


@dataclass(frozen=True, slots=True)
class Interval:
    """Values of a key that are drawn at random, uniformly or so that each order of magnitude is as likely."""

    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False
    """Whole numbers, both ends included."""


def parse_interval(text: str) -> tuple[str, Interval]:
    """Return KEY.PATH and its interval, from `optimizer.lr=1e-5:1e-2:log`. Raises InvalidGrid.

    It has whole numbers if both ends are written as whole numbers.
    """
    key, equals, given = text.partition("=")
    ends = [part.strip() for part in given.split(":")]
    form = f"--range {text!r}: use KEY.PATH=LOW:HIGH or KEY.PATH=LOW:HIGH:log, for example optimizer.lr=1e-5:1e-2:log."
    if not key.strip() or not equals or len(ends) not in (2, 3) or ends[2:] not in ([], ["log"]):
        raise InvalidGrid(form)
    try:
        low, high = float(ends[0]), float(ends[1])
    except ValueError:
        raise InvalidGrid(form) from None
    whole = all(end.lstrip("+-").isdecimal() for end in ends[:2])
    return key.strip(), Interval(low, high, is_log=len(ends) == 3, is_whole=whole)


def describe_problem(interval: Interval) -> str:
    """Return why the interval is not valid; empty if it is."""
    if not (math.isfinite(interval.low) and math.isfinite(interval.high) and interval.low < interval.high):
        return f"low is {interval.low:g} and high is {interval.high:g}: low must be a number less than high"
    if interval.is_log and interval.low <= 0:
        return f"low is {interval.low:g}, and a logarithmic range needs low > 0"
    if interval.is_whole and (interval.low % 1 or interval.high % 1):
        return f"the ends {interval.low:g} and {interval.high:g} of a range of whole numbers must be whole"
    return ""


def draw(
    lists: Mapping[str, Sequence[str]], intervals: Mapping[str, Interval], *, samples: int, seed: int
) -> list[dict[str, str]]:
    """Draw `samples` different sets of values as text, by key path. Raises InvalidGrid if there are fewer.

    A set has a value of each list, and a number of each interval with four significant digits.
    """
    if both := sorted(lists.keys() & intervals.keys()):
        raise InvalidGrid(f"ranges.{both[0]}: grid has values of this key too. Leave one of the two out.")
    for key, interval in intervals.items():
        if problem := describe_problem(interval):
            raise InvalidGrid(f"ranges.{key}: {problem}.")
    drawn: dict[tuple[str, ...], dict[str, str]] = {}
    for number in range(1, samples * _DRAWS_PER_SAMPLE + 1):
        choice = {key: values[int(_uniform(seed, number, key) * len(values))] for key, values in lists.items()}
        choice |= {key: _scale(interval, _uniform(seed, number, key)) for key, interval in intervals.items()}
        drawn.setdefault(tuple(choice.values()), choice)
        if len(drawn) == samples:
            return list(drawn.values())
    raise InvalidGrid(
        f"samples is {samples:,}, and {samples * _DRAWS_PER_SAMPLE:,} draws gave only {len(drawn):,} different sets of "
        "values. Lower samples, or leave it out to submit every combination of the grid."
    )


def _uniform(seed: int, number: int, key: str) -> float:
    return Random(f"{seed}/{number}/{key}").random()


def _scale(interval: Interval, share: float) -> str:
    low, high = interval.low, interval.high + (1 if interval.is_whole else 0)
    if interval.is_log:
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        value = low + share * (high - low)
    if interval.is_whole:
        return str(min(math.floor(value), int(interval.high)))
    return f"{min(max(value, low), high):.4g}"


def make_document(shared: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the spec that the jobs share, with these values by key path. Raises InvalidGrid."""
    document: dict[str, Any] = copy.deepcopy(dict(shared))
    for path, value in values.items():
        top = path.partition(".")[0]
        if not all(path.split(".")):
            raise InvalidGrid(f"grid: {path!r} is not a path of keys, for example optimizer.lr.")
        if top in _NOT_OF_A_GRID:
            raise InvalidGrid(f"grid: {path} cannot be varied, since {_NOT_OF_A_GRID[top]}.")
        try:
            assign(document, path, copy.deepcopy(value))
        except NotASection as error:
            raise InvalidGrid(f"grid: {error}.") from None
    return document


def describe_labels(labels: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in labels.items())


def label_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the label for each key path: its last part, or all of it if that is not unique or is `sweep`."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: short if last.count(short) == 1 and short != "sweep" else key
        for key, short in zip(keys, last, strict=True)
    }


def make_labels(choice: Mapping[str, str]) -> dict[str, str]:
    names = label_names(list(choice))
    return {names[key]: value.strip("'\"")[:255] for key, value in choice.items()}


def _split(text: str) -> list[str]:
    parts, depth, quote, part = [], 0, "", ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in _QUOTES:
            quote = char
        else:
            depth += (char in _OPENING) - (char in _CLOSING)
        if char == "," and not quote and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += char
    return [*parts, part]


def rank(val_loss: float | None, loss: float | None) -> tuple[bool, float]:
    """Return the sort key of a job of a sweep, the best first.

    By validation loss if there is one, else by loss; jobs that have neither come last.
    """
    value = val_loss if val_loss is not None else loss
    return value is None, math.inf if value is None or math.isnan(value) else value


def best_so_far(points: Iterable[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Return those (time, value, job id) that are lower than every one before them in time."""
    scores: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if math.isfinite(point[1]) and (not scores or point[1] < scores[-1][1]):
            scores.append(point)
    return scores


LEAST_OTHERS = 2
AVERAGED_STEPS = 8
"""A training loss is the mean of this many steps, since that of one step depends on its batch."""


class Measure(StrEnum):
    """The loss that is compared."""

    VALIDATION = "validation loss"
    TRAINING = "training loss"


class Method(StrEnum):
    """The values of `sweep.prune`."""

    MEDIAN = "median"
    HALVING = "halving"


@dataclass(frozen=True, slots=True)
class Rule:
    """The settings by which a job is pruned."""

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


def make_rule(every_steps: int | None, warmup_steps: int, method: Method = Method.MEDIAN, reduction: int = 3) -> Rule:
    """Make the rule of a job. `every_steps`: steps between two validations; None if it does not validate."""
    measure = Measure.TRAINING if every_steps is None else Measure.VALIDATION
    return Rule(measure, every_steps or AVERAGED_STEPS, warmup_steps, method, reduction)


def step_to_compare(job_id: str, reached: Mapping[str, int], rule: Rule) -> int | None:
    """Return the step at which the job is compared with others; None if there is no such step yet.

    Args:
        reached: the last step of each job of the sweep for which it has a value of this measure.
    """
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
    """Decide if the job is ended; None if it goes on.

    Args:
        values: of the jobs that have one at this step; smaller values are better.
    """
    if job_id not in values:
        return None
    others = [_replace_nan(value) for other, value in values.items() if other != job_id]
    this, num_kept = _replace_nan(values[job_id]), None
    if rule.method is Method.HALVING:
        if len(values) < rule.reduction:
            return None
        num_kept = -(-len(values) // rule.reduction)
        bound = sorted([*others, this])[num_kept - 1]
    elif len(others) < LEAST_OTHERS:
        return None
    else:
        bound = median_high(others)  # of an even number the larger one: at most half of the jobs are ended
    return Verdict(step, values[job_id], bound, len(others), num_kept) if this > bound else None


def _rung(reached: int, rule: Rule) -> int | None:
    """Return the highest rung up to this step; None if the job is below the first rung."""
    passed_rung, step = None, max(1, rule.warmup_steps)
    while (rung := -(-step // rule.every_steps) * rule.every_steps) <= reached:
        passed_rung, step = rung, step * rule.reduction
    return passed_rung


def _replace_nan(value: float) -> float:
    """Return infinity for NaN, which is worse than every number."""
    return math.inf if math.isnan(value) else value
