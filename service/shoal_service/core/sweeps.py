"""Sweeps: the grid of values that its jobs try, and which of them are ended early. Pure.

The grid makes `optimizer.lr=1e-4,3e-4` and others one set of values for each job; the command line and the client use
it. A value is YAML, as in `--set`. Commas inside brackets, braces and quotes do not separate values.

The control loop prunes by the median rule (Golovin et al. 2017, "Google Vizier", section 3.2.2): a job of a sweep that
is worse than half of the others at the same step is ended. The step is the last one that the job and at least two
others have reached, so a job that is ahead is compared as soon as others follow, and one that runs after others have
ended is compared from the end of its warm-up. With fewer than two others nothing is decided: the median of one value is
that value, and the rule would be a duel. The limit of a sweep is a rule of the scheduler, in `core/scheduling`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from statistics import median_high
from typing import Any

from shoal_service.core.key_paths import NotASection, assign

MAX_JOBS = 1_000
_NOT_OF_A_GRID = {
    "name": "the jobs are numbered",
    "sweep": "all jobs are of this one",
    "project": "a sweep is of one project",
}
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "'\""


class InvalidGrid(ValueError):
    """The message names the axis and the form."""


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """KEY.PATH and the texts of its values. Raises InvalidGrid."""
    key, equals, values = text.partition("=")
    found = tuple(value.strip() for value in _split(values))
    if not key.strip() or not equals or not all(found) or not found:
        raise InvalidGrid(f"--grid {text!r}: use KEY.PATH=VALUE,VALUE,..., for example optimizer.lr=1e-4,3e-4.")
    if len(set(found)) < len(found):
        raise InvalidGrid(f"--grid {text!r}: a value is given twice.")
    return key.strip(), found


def combinations(axes: Sequence[tuple[str, tuple[str, ...]]]) -> list[dict[str, str]]:
    """Every combination, by key path; the last axis changes fastest. Raises InvalidGrid."""
    keys = [key for key, _ in axes]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise InvalidGrid(f"--grid names {', '.join(sorted(twice))} twice: give all of its values in one --grid.")
    number = 1
    for _, values in axes:
        number *= len(values)
    if number > MAX_JOBS:
        raise InvalidGrid(
            f"The grid has {number:,} combinations, and a sweep at most {MAX_JOBS:,} jobs: leave some out."
        )
    return [dict(zip(keys, chosen, strict=True)) for chosen in product(*(values for _, values in axes))]


def document_of(shared: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the spec that the jobs share, with these values by key path. Raises InvalidGrid."""
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


def words(labels: Mapping[str, str]) -> str:
    """The values of one job, for people."""
    return " ".join(f"{name}={value}" for name, value in labels.items())


def label_names(keys: Sequence[str]) -> dict[str, str]:
    """The label for each key path: its last part, or all of it where that is not unique or is taken by the sweep."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: short if last.count(short) == 1 and short != "sweep" else key
        for key, short in zip(keys, last, strict=True)
    }


def labels_of(chosen: Mapping[str, str]) -> dict[str, str]:
    names = label_names(list(chosen))
    return {names[key]: value.strip("'\"")[:255] for key, value in chosen.items()}


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
    """The key that sorts the jobs of a sweep, the best first: by validation loss, where there is one; then by loss;
    then those that have neither."""
    value = val_loss if val_loss is not None else loss
    return value is None, _or_worst(value) if value is not None else 0.0


def _or_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value
