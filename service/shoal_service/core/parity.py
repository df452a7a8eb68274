"""The loss parity report: two series of losses, compared step by step. `store/histories.py` passes the rows.

A job that lost workers, was resized, paused or moved must have the losses of a run without disturbance: equal bits in
deterministic mode, within a relative tolerance otherwise. A step that was rolled back and repeated is in the series
once, with its last value. `differences` says whether equal losses can be expected at all; nothing here reads the store.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from itertools import groupby, repeat
from typing import Any, NamedTuple

from shoal_service.core.key_paths import read
from shoal_workers.contract import Frozen, JobSpec

Losses = Iterable[tuple[int, float]]
"""Steps and their losses; the steps ascend."""
DEFAULT_TOLERANCE = 1e-5
DECISIVE = (
    "task",
    "script",
    "code.archive",
    "model",
    "data",
    "seed",
    "batch",
    "optimizer",
    "schedule",
    "precision",
    "module_precision",
    "fp8",
    "stop",
    "deterministic",
    "health.non_finite",
)
"""Keys of the spec that determine the losses. All others (workers, layout, checkpoints ...) must not change them."""


class SpecDifference(Frozen):
    """A key that determines the losses, and differs between two specs."""

    path: str
    """Dotted, for example optimizer.lr."""
    value: Any
    against: Any


class ParityPoint(Frozen):
    """The losses of two jobs at one step."""

    step: int
    loss: float
    """NaN and infinity are null."""
    against: float
    abs_diff: float
    rel_diff: float


class Parity(Frozen):
    """How far the losses of two jobs differ, step by step: a job with incidents and one without, for example."""

    tolerance: float
    """Largest relative difference that counts as equal."""
    within_tolerance: bool
    """At least one step was compared, none differs by more than `tolerance`, and neither job has other steps after the
    first that both have."""
    bit_identical: bool
    """As `within_tolerance`, and all losses are the same doubles."""
    steps_compared: int
    steps_only_in_job: int
    steps_only_in_against: int
    max_abs_diff: float | None = None
    max_abs_diff_step: int | None = None
    max_rel_diff: float | None = None
    """|a - b| / max(|a|, |b|); infinite (null in JSON) if only one of them is finite."""
    max_rel_diff_step: int | None = None
    first_step_different: int | None = None
    first_step_over_tolerance: int | None = None
    steps_over_tolerance: int = 0
    differs_in: tuple[SpecDifference, ...] = ()
    """Keys that explain different losses: data, model, seed and so on. Empty: the specs match."""
    points: tuple[ParityPoint, ...] = ()
    """A long series is divided into equal ranges of steps; each is shown by its largest relative difference."""


def compare(losses: Losses, reference: Losses, *, tolerance: float, max_points: int = 0) -> Parity:
    """Compare two series; reads each of them once. `max_points` 0: the summary only."""
    num_compared = num_over = 0
    num_unmatched = {_JOB: 0, _AGAINST: 0}
    has_other_steps = False
    largest_abs = largest_rel = first_different = first_over = None
    points = _Thinned(max_points)
    for step, values in _side_by_side(losses, reference):
        if len(values) == 1:
            has_other_steps = has_other_steps or num_compared > 0
            num_unmatched[next(iter(values))] += 1
            continue
        point = _Point(step, values[_JOB], values[_AGAINST], *_distance(values[_JOB], values[_AGAINST]))
        num_compared += 1
        if largest_abs is None or point.abs_diff > largest_abs.abs_diff:
            largest_abs = point
        if largest_rel is None or point.rel_diff > largest_rel.rel_diff:
            largest_rel = point
        if first_different is None and point.abs_diff > 0:
            first_different = step
        if point.rel_diff > tolerance:
            num_over += 1
            first_over = step if first_over is None else first_over
        points.add(point)
    differs, is_same_training = first_different is not None, num_compared > 0 and not has_other_steps
    return Parity(
        tolerance=tolerance,
        within_tolerance=is_same_training and num_over == 0,
        bit_identical=is_same_training and not differs,
        steps_compared=num_compared,
        steps_only_in_job=num_unmatched[_JOB],
        steps_only_in_against=num_unmatched[_AGAINST],
        max_abs_diff=largest_abs.abs_diff if largest_abs else None,
        max_abs_diff_step=largest_abs.step if largest_abs and differs else None,
        max_rel_diff=largest_rel.rel_diff if largest_rel else None,
        max_rel_diff_step=largest_rel.step if largest_rel and differs else None,
        first_step_different=first_different,
        first_step_over_tolerance=first_over,
        steps_over_tolerance=num_over,
        points=tuple(points.points()),
    )


def differences(spec: JobSpec, against: JobSpec) -> tuple[SpecDifference, ...]:
    """The keys below DECISIVE that differ, each by its full path."""
    left, right = spec.model_dump(mode="json"), against.model_dump(mode="json")
    return tuple(
        difference
        for path in DECISIVE
        for difference in _differences(path, read(left, path.split(".")), read(right, path.split(".")))
    )


_JOB, _AGAINST = 0, 1
"""The two series."""


def _side_by_side(losses: Losses, reference: Losses) -> Iterator[tuple[int, dict[int, float]]]:
    """Yield each step of either series, with the losses of those that have it, by series."""
    numbered = (zip(repeat(series), values) for series, values in ((_JOB, losses), (_AGAINST, reference)))
    merged = heapq.merge(*numbered, key=lambda item: item[1][0])
    for step, items in groupby(merged, key=lambda item: item[1][0]):
        yield step, {series: loss for series, (_, loss) in items}


class _Point(NamedTuple):
    """The values of a ParityPoint, without validation: there is one for every step of two long series."""

    step: int
    loss: float
    against: float
    abs_diff: float
    rel_diff: float


def _distance(a: float, b: float) -> tuple[float, float]:
    """(absolute, relative). Two NaNs do not differ, nor do two equal infinities."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0, 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf, math.inf
    largest = max(abs(a), abs(b))
    return abs(a - b), abs(a / largest - b / largest)


class _Thinned:
    """Keeps at most `max_points` of any number of points: of two neighbours the one with the larger difference.

    Starts with buckets of one point. When there are too many buckets, neighbouring pairs of them are merged.
    """

    def __init__(self, max_points: int) -> None:
        self._max_points = max_points
        self._width = 1
        self._buckets: list[_Point] = []
        self._in_last = 0

    def add(self, point: _Point) -> None:
        if self._max_points == 0:
            return
        if self._buckets and self._in_last < self._width:
            self._buckets[-1] = _worse(self._buckets[-1], point)
            self._in_last += 1
            return
        if len(self._buckets) == self._max_points:
            self._merge()
            self.add(point)
            return
        self._buckets.append(point)
        self._in_last = 1

    def points(self) -> Iterator[ParityPoint]:
        return (ParityPoint(**point._asdict()) for point in self._buckets)

    def _merge(self) -> None:
        """All buckets are full. The last one of an odd number has no partner, so it is half full after this."""
        pairs = [self._buckets[i : i + 2] for i in range(0, len(self._buckets), 2)]
        self._in_last = self._width * len(pairs[-1])
        self._width *= 2
        self._buckets = [pair[0] if len(pair) == 1 else _worse(*pair) for pair in pairs]


def _worse(a: _Point, b: _Point) -> _Point:
    return b if b.rel_diff > a.rel_diff else a


def _differences(path: str, value: Any, against: Any) -> Iterator[SpecDifference]:
    if isinstance(value, dict) and isinstance(against, dict):
        for key in sorted(value.keys() | against.keys()):
            yield from _differences(f"{path}.{key}", value.get(key), against.get(key))
    elif value != against:
        yield SpecDifference(path=path, value=value, against=against)
