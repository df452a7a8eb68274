"""Fewer points of a long series: means over equal buckets of steps. `store/curves.py` passes the rows.

It reads its input once, and never holds more than one bucket. Also how often a job's accounts are sampled, for the
curves of goodput and of world size over time.

Which single steps and events of a job stay once the job has come far beyond them.

    steps   1 ......... 4096 | 4097 ....... 8192 | ......      the newest KEPT_STEPS
            #  #####    #  # | #    #          # | ##################################
            first, around an incident, extremes                all of them

Roll-ups (store/curves.py) keep the shape of the curve. The single steps that stay are those that a mean would hide or
that a reader asks for by number. `store/curves.py` deletes the others while the job trains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field

from shoal_workers.contract import Frozen

_SHORTEST_S = 5.0
_PER_AGE = 200
BIN_S = 600.0
"""Length of the intervals of the cluster's goodput."""


def _nan_of_null(value: object) -> object:
    return math.nan if value is None else value


Measured = Annotated[float, BeforeValidator(_nan_of_null)]
"""A number of a step, which is NaN if it is not finite, or if a script has not reported it. JSON has null for NaN."""


class SeriesPoint(Frozen):
    """One completed step, or the mean of several if the series is down-sampled."""

    step: int
    at: float
    loss: Measured
    grad_norm: Measured
    lr: Measured
    tokens_per_s: Measured
    step_s: float
    world_size: int
    generation: int
    val_loss: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    """The task's own metrics in training, by name. One that is not finite is left out."""
    val_metrics: dict[str, float] = Field(default_factory=dict)
    """Those of the validation after this step; empty: there was none."""


def bucket_steps(first_step: int, last_step: int, max_points: int) -> int:
    """The smallest number of steps per bucket that gives at most `max_points` buckets from first_step to last_step."""
    assert max_points >= 1 and first_step <= last_step
    return -(-(last_step - first_step + 1) // max_points)


def downsample(points: Iterable[SeriesPoint], *, first_step: int, width: int) -> list[SeriesPoint]:
    """One point for each bucket of `width` steps that has any; the steps of `points` ascend.

    The values are means. Step, time, world size and generation are those of the last step in the bucket, so the last
    point of the series is always the newest step.
    """
    buckets = groupby(points, key=lambda point: (point.step - first_step) // width)
    return [_merge(list(bucket)) for _, bucket in buckets]


def _merge(bucket: list[SeriesPoint]) -> SeriesPoint:
    if len(bucket) == 1:
        return bucket[0]
    validated = [point.val_loss for point in bucket if point.val_loss is not None]
    return bucket[-1].model_copy(
        update={
            "loss": _mean([point.loss for point in bucket]),
            "grad_norm": _mean([point.grad_norm for point in bucket]),
            "lr": _mean_of_reported([point.lr for point in bucket]),
            "tokens_per_s": _mean_of_reported([point.tokens_per_s for point in bucket]),
            "step_s": _mean([point.step_s for point in bucket]),
            "val_loss": _mean(validated) if validated else None,
            "metrics": _means([point.metrics for point in bucket]),
            "val_metrics": _means([point.val_metrics for point in bucket]),
        }
    )


def _means(points: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each name over the points that have it."""
    names = sorted({name for metrics in points for name in metrics})
    return {name: _mean([metrics[name] for metrics in points if name in metrics]) for name in names}


def _mean_of_reported(values: list[float]) -> float:
    """The mean without NaN: these are finite for a task, and a script may report them rarely."""
    known = [value for value in values if not math.isnan(value)]
    return _mean(known) if known else math.nan


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def sample_is_due(sampled_at: float, created_at: float, now: float) -> bool:
    """Return whether a job's accounts are sampled again, without any change: the rarer, the older the job is. So a job
    of any age has some hundreds of samples, about `_PER_AGE * ln(age)`."""
    return now - sampled_at >= max(_SHORTEST_S, (now - created_at) / _PER_AGE)


def bin_of(at: float) -> float:
    """The beginning of the interval of the cluster's goodput that `at` lies in."""
    return at // BIN_S * BIN_S


KEPT_STEPS = 131_072
"""The newest steps of a job, all of which stay; and the newest roll-ups of each of the finer levels."""
CHUNK = 4_096
"""Steps that are thinned together."""
AROUND = 32
"""Steps that stay before and after a change of the group."""
KEPT_EVENTS = 20_000
"""The newest events of a job, all of which stay. Of older ones those of routine go (`JobEvent.is_routine`)."""
MEASURES = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s")
"""Columns whose smallest, largest and first values of all steps are asked for: `max(loss)` in a condition."""


class Columns(NamedTuple):
    """Steps in their order. A measure is None if it is not finite, or was not reported."""

    step: Sequence[int]
    generation: Sequence[int]
    world_size: Sequence[int]
    val_loss: Sequence[float | None]
    measures: Sequence[Sequence[float | None]]
    """One sequence for each of MEASURES."""


def steps_to_keep(rows: Columns) -> frozenset[int]:
    """The steps of a chunk that stay.

    Args:
        rows: those of the chunk, and the AROUND steps after it: a group that changes there is an incident for the end
            of the chunk too.
    """
    steps = rows.step
    kept = {steps[0], *(step for step, value in zip(steps, rows.val_loss, strict=True) if value is not None)}
    groups = list(zip(rows.generation, rows.world_size, strict=True))
    for step, before, group in zip(steps[1:], groups, groups[1:], strict=False):
        if group != before:
            kept.update(range(step - AROUND, step + AROUND))
    for column in rows.measures:
        missing = [step for step, value in zip(steps, column, strict=True) if value is None]
        kept.update(missing[:1])
        if values := [value for value in column if value is not None]:
            first, lowest, highest = (column.index(value) for value in (values[0], min(values), max(values)))
            kept.update((steps[first], steps[lowest], steps[highest]))
            kept.update([step for step in missing if step > steps[first]][:1])
    return frozenset(kept)
