"""What a metric is (name, kind, help, labels, buckets), and the job from which a metric of a job takes its value.

Pure data. `catalogue.py` declares the metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal_service.views import JobStatus
from shoal_workers.contract import JobSpec, JobState, WorkerUse

Labels = tuple[str, ...]
STEP_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the buckets of step times, seconds; the last bucket is above all of them."""


class Kind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class RecoveryPhase(StrEnum):
    """Parts of a recovery, and `recovery`: all of it, from detection to the first completed step."""

    DETECT = "detect"
    QUIESCE = "quiesce"
    PLAN = "plan"
    FORM = "form"
    RESTORE = "restore"
    FIRST_STEP = "first_step"
    RECOVERY = "recovery"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCheckpoint:
    """The newest committed checkpoint of a job."""

    bytes: int
    seconds: float
    committed_at: float


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """What the metrics show of a worker: a part of WorkerView, since each report changes the rest."""

    rank: int | None
    node_id: str
    use: WorkerUse | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The histogram of a job's step times over all its attempts. It only grows.

    The store adds the steps of each report in the transaction that stores them, so that each is counted once.
    """

    counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS_S) + 1)
    """Steps per bucket."""
    total_s: float = 0.0

    def add(self, times_s: Iterable[float]) -> StepTimes:
        counts, total_s = list(self.counts), self.total_s
        for step_s in times_s:
            counts[bisect_left(STEP_BOUNDS_S, step_s)] += 1
            total_s += step_s
        return StepTimes(tuple(counts), total_s)

    def text(self) -> str:
        """The times as text, for one column of the job's row."""
        return " ".join([*map(str, self.counts), repr(self.total_s)])

    @classmethod
    def read(cls, text: str) -> StepTimes:
        """The times that `text` gave. Text that is empty, or of a release with other buckets, counts as no steps."""
        *counts, total_s = text.split() or ["0"]
        if len(counts) != len(STEP_BOUNDS_S) + 1:
            return cls()
        return cls(tuple(map(int, counts)), float(total_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """A job that has an attempt, or has just ended: the source of the metrics with the label `job_id`."""

    job_id: str
    state: JobState
    """The column; `status` has no state of its own."""
    spec: JobSpec
    attempt: int
    granted_workers: int
    started_at: float | None
    status: JobStatus
    workers: tuple[WorkerSample, ...]
    checkpoint: NewestCheckpoint | None
    step_times: StepTimes


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of observations at or below each bound (cumulative), number of all, and their sum."""

    counts: tuple[int, ...]
    count: int
    total: float

    @classmethod
    def of_buckets(cls, counts: tuple[int, ...], total: float) -> Histogram:
        """`counts`: number of observations in each bucket; the last bucket is above all bounds."""
        sums, count = [], 0
        for number in counts:
            count += number
            sums.append(count)
        return cls(tuple(sums[:-1]), count, total)


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation that a bucket of a histogram names."""

    labels: Mapping[str, str]
    value: float
    at: float


Value = float | Histogram
Values = Mapping[Labels, Value] | float | Histogram | None
"""Values of a job by the labels that follow `job_id`; a number or a histogram if there is none; None if it has no value
yet."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending, without +Inf."""
    of_job: Callable[[LiveJob], Values] | None = None
    """The value for a job. An absent value has no series."""
