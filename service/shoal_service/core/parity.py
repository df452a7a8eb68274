"""The loss parity report: two series of losses, compared step by step. `store/histories.py` passes the rows.

A job that lost workers, was resized, paused or moved must have the losses of a run without disturbance: equal bits in
deterministic mode, within a relative tolerance otherwise. A step that was rolled back and repeated is in the series
once, with its last value. `differences` says whether equal losses can be expected at all; nothing here reads the store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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
    summary = _Summary(tolerance)
    points = _Thinned(max_points)
    for step, loss, other in _side_by_side(losses, reference):
        if loss is None or other is None:
            summary.add_unmatched(in_job=loss is not None)
            continue
        point = _point(step, loss, other)
        summary.add(point)
        points.add(point)
    return summary.parity(tuple(points.points()))


def differences(spec: JobSpec, against: JobSpec) -> tuple[SpecDifference, ...]:
    """The keys below DECISIVE that differ, each by its full path."""
    left, right = spec.model_dump(mode="json"), against.model_dump(mode="json")
    return tuple(
        difference for path in DECISIVE for difference in _differences(path, _at(left, path), _at(right, path))
    )


def _side_by_side(losses: Losses, reference: Losses) -> Iterator[tuple[int, float | None, float | None]]:
    """(step, loss, other loss) for every step of either series; None if a series does not have the step."""
    left, right = iter(losses), iter(reference)
    a, b = next(left, None), next(right, None)
    while a is not None or b is not None:
        if b is None or (a is not None and a[0] < b[0]):
            assert a is not None
            yield a[0], a[1], None
            a = next(left, None)
        elif a is None or b[0] < a[0]:
            yield b[0], None, b[1]
            b = next(right, None)
        else:
            yield a[0], a[1], b[1]
            a, b = next(left, None), next(right, None)


class _Point(NamedTuple):
    """The values of a ParityPoint, without validation: there is one for every step of two long series."""

    step: int
    loss: float
    against: float
    abs_diff: float
    rel_diff: float


def _point(step: int, loss: float, other: float) -> _Point:
    return _Point(step, loss, other, *_distance(loss, other))


def _distance(a: float, b: float) -> tuple[float, float]:
    """(absolute, relative). Two NaNs do not differ, nor do two equal infinities."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0, 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf, math.inf
    largest = max(abs(a), abs(b))
    return abs(a - b), abs(a / largest - b / largest)


class _Summary:
    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._compared = 0
        self._only_in_job = 0
        self._only_in_against = 0
        self._has_other_steps = False
        """One of them has a step after the first common one that the other has not."""
        self._over = 0
        self._largest_abs: _Point | None = None
        self._largest_rel: _Point | None = None
        self._first_different: int | None = None
        self._first_over: int | None = None

    def add_unmatched(self, *, in_job: bool) -> None:
        self._has_other_steps = self._has_other_steps or self._compared > 0
        if in_job:
            self._only_in_job += 1
        else:
            self._only_in_against += 1

    def add(self, point: _Point) -> None:
        self._compared += 1
        if self._largest_abs is None or point.abs_diff > self._largest_abs.abs_diff:
            self._largest_abs = point
        if self._largest_rel is None or point.rel_diff > self._largest_rel.rel_diff:
            self._largest_rel = point
        if self._first_different is None and point.abs_diff > 0:
            self._first_different = point.step
        if point.rel_diff > self._tolerance:
            self._over += 1
            self._first_over = point.step if self._first_over is None else self._first_over

    def parity(self, points: tuple[ParityPoint, ...]) -> Parity:
        differs = self._first_different is not None
        is_same_training = self._compared > 0 and not self._has_other_steps
        return Parity(
            tolerance=self._tolerance,
            within_tolerance=is_same_training and self._over == 0,
            bit_identical=is_same_training and not differs,
            steps_compared=self._compared,
            steps_only_in_job=self._only_in_job,
            steps_only_in_against=self._only_in_against,
            max_abs_diff=self._largest_abs.abs_diff if self._largest_abs else None,
            max_abs_diff_step=self._largest_abs.step if self._largest_abs and differs else None,
            max_rel_diff=self._largest_rel.rel_diff if self._largest_rel else None,
            max_rel_diff_step=self._largest_rel.step if self._largest_rel and differs else None,
            first_step_different=self._first_different,
            first_step_over_tolerance=self._first_over,
            steps_over_tolerance=self._over,
            points=points,
        )


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


def _at(document: dict[str, Any], path: str) -> Any:
    """None if the document has no such key, as that of a script has none of a task."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _differences(path: str, value: Any, against: Any) -> Iterator[SpecDifference]:
    if isinstance(value, dict) and isinstance(against, dict):
        for key in sorted(value.keys() | against.keys()):
            yield from _differences(f"{path}.{key}", value.get(key), against.get(key))
    elif value != against:
        yield SpecDifference(path=path, value=value, against=against)
