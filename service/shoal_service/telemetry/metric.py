"""What a metric is: name, kind, help, labels, buckets, and for a metric of a job its value. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal_service.telemetry.step_times import StepTimes
from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState
from shoal_workers.contract.messages import WorkerUse
from shoal_workers.contract.spec import JobSpec

Labels = tuple[str, ...]


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
        """`counts`: of each bucket, the last one above all bounds."""
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
"""Values of a job by the labels that follow `job_id`; a number or a histogram if there is none; None: it has no value
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


def declared(module: Mapping[str, object]) -> Iterator[Metric]:
    """The metrics of a module, in the order of its file."""
    return (value for value in list(module.values()) if isinstance(value, Metric))
