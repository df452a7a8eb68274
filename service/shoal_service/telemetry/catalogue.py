"""The metrics of a job: name, kind, help, labels, buckets, and how the value is found in a `LiveJob`. Pure data.

They are those of each job that has an attempt or has just ended, and of its workers. Their labels are `job_id`, the
rank, closed sets of words, node ids, and names of a task's own metrics. The metrics that are not of one job are rows of
`exposition.OF_SERVICE`; those histograms of them that the store or a tally fills are declared here.

The exposition shows them; `make docs` lists them. A renamed metric breaks the dashboards and alerts of users, so a test
compares the names with a snapshot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import accumulate

from shoal_service.core.system_metrics import busy_share
from shoal_service.views import ConditionType, JobStatus
from shoal_workers.contract import MAX_METRICS, JobSpec, JobState, StepPart, WorkerUse

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


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandStanding:
    """What the ledger of rounds has of the island that a job trains."""

    rounds: int
    """Closed ones of all islands."""
    rounds_missed: int
    """The newest closed ones without this island, in a row."""
    waited_s: float | None
    """Seconds that it had waited for rounds in its generation at its newest difference; None: none has arrived."""


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
    island: IslandStanding | None = None
    """None if the job trains no island, or nothing has arrived for a round."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of observations at or below each bound (cumulative), number of all, and their sum."""

    counts: tuple[int, ...]
    count: int
    total: float

    @classmethod
    def from_buckets(cls, counts: tuple[int, ...], total: float) -> Histogram:
        """`counts`: number of observations in each bucket; the last bucket is above all bounds."""
        *sums, count = accumulate(counts)
        return cls(tuple(sums), count, total)


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


_JOB = ("job_id",)
_RANK = ("job_id", "rank")
_SHOWN_STATES = [state for state in JobState if state not in (JobState.QUEUED, JobState.PAUSED)]
_ONE_OF_STATES: Mapping[JobState, Values] = {
    now: {(state.value,): int(state is now) for state in _SHOWN_STATES} for now in JobState
}
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
"""Buckets of what usually takes milliseconds, seconds."""


def _gauge(name: str, help: str, of_job: Callable[[LiveJob], Values], *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, help, (*_JOB, *labels), of_job=of_job)


def _counter(name: str, help: str, of_job: Callable[[LiveJob], Values]) -> Metric:
    return Metric(name, Kind.COUNTER, help, _JOB, of_job=of_job)


def _read_condition(status: JobStatus, type_: ConditionType) -> float | None:
    """1 if the condition is true, 0 if it is false, None if it is not known."""
    return next((float(condition.status) for condition in status.conditions if condition.type is type_), None)


def _compute_samples_per_s(job: LiveJob) -> float | None:
    status = job.status
    if job.spec.program is not None:
        return None  # its batch is its own
    return job.spec.batch.global_size / status.step_s if status.step_s and status.tokens_per_s is not None else None


def _read_goodput(job: LiveJob) -> Mapping[tuple[str, ...], float] | None:
    booked = job.status.goodput
    return {(category.value,): seconds for category, seconds in booked.seconds.items()} if booked else None


def _read_recovering(job: LiveJob) -> Mapping[tuple[str, ...], float] | None:
    booked = job.status.goodput
    return {(cause.value,): seconds for cause, seconds in booked.recovering.items()} if booked else None


def _read_task_metrics(job: LiveJob) -> Mapping[tuple[str, ...], float]:
    splits = {"train": job.status.metrics, "validation": job.status.val_metrics}
    return {(name, split): value for split, metrics in splits.items() for name, value in metrics.items()}


@cache
def _label_rank(rank: int) -> tuple[str, ...]:
    """The label of a rank. One object serves all jobs and all scrapes."""
    return (str(rank),)


def _read_by_rank(of_use: Callable[[WorkerUse], float | None]) -> Callable[[LiveJob], Values]:
    """Makes the function that reads one measurement of each worker of the group, by rank."""

    def values(job: LiveJob) -> Mapping[tuple[str, ...], float]:
        return {
            _label_rank(worker.rank): value
            for worker in job.workers
            if worker.rank is not None and worker.use is not None and (value := of_use(worker.use)) is not None
        }

    return values


def _average_phases(job: LiveJob) -> Mapping[tuple[str, ...], float] | None:
    shares = [worker.use.phases for worker in job.workers if worker.rank is not None and worker.use is not None]
    known = [share for share in shares if share]
    return (
        {(part.value,): sum(phase.get(part, 0.0) for phase in known) / len(known) for part in StepPart}
        if known
        else None
    )


JOB_MFU = _gauge(
    "shoal_job_mfu_ratio",
    "Model FLOPs utilisation: the planner's FLOPs per token times tokens per second, over the peak of the profile.",
    lambda job: None,  # JobSeries computes it from the planner's numbers, which are not part of a job
)
OF_JOBS: tuple[Metric, ...] = (
    _gauge(
        "shoal_job_info",
        "Always 1. Join it to give series of a job its name, layout, priority and project.",
        lambda job: {(job.spec.name, job.status.layout, str(job.spec.priority), job.spec.project): 1},
        "name",
        "layout",
        "priority",
        "project",
    ),
    _gauge(
        "shoal_job_state",
        "1 for the state that a job is in, 0 for the others.",
        lambda job: _ONE_OF_STATES[job.state],
        "state",
    ),
    _gauge(
        "shoal_job_start_timestamp_seconds", "When a job's first attempt began, Unix time.", lambda job: job.started_at
    ),
    _gauge(
        "shoal_job_report_timestamp_seconds",
        "Time of the newest report of a job's supervisor, Unix time: it stands still if the supervisor is gone.",
        lambda job: job.status.goodput.at if job.status.goodput else None,
    ),
    _counter("shoal_job_attempts_total", "Attempts of a job: times that it left the queue.", lambda job: job.attempt),
    _gauge("shoal_job_workers", "World size of a job: workers of its group.", lambda job: job.status.workers),
    _gauge(
        "shoal_job_desired_workers", "Workers that the scheduler has granted to a job.", lambda job: job.granted_workers
    ),
    _gauge(
        "shoal_job_max_workers",
        "Workers that a job wants: elasticity.max_workers.",
        lambda job: job.spec.elasticity.max_workers,
    ),
    _gauge(
        "shoal_job_step",
        "Optimizer steps that a job has completed.",
        lambda job: None if job.spec.script is not None and not job.status.step else job.status.step,
    ),
    _gauge("shoal_job_total_steps", "Optimizer steps after which a job ends.", lambda job: job.status.total_steps),
    _gauge(
        "shoal_job_step_timestamp_seconds",
        "When a job completed its newest step, Unix time.",
        lambda job: job.status.step_at,
    ),
    _gauge("shoal_job_loss", "Training loss of a job's newest step.", lambda job: job.status.loss),
    _gauge("shoal_job_validation_loss", "Loss of a job's newest validation.", lambda job: job.status.val_loss),
    _gauge(
        "shoal_job_task_metric",
        f"Metrics of a job's task in its newest step or validation; at most {MAX_METRICS} names in each.",
        _read_task_metrics,
        "metric",
        "split",
    ),
    _gauge(
        "shoal_job_gradient_norm",
        "L2 norm of the gradient of a job's newest step, before clipping.",
        lambda job: job.status.grad_norm,
    ),
    _gauge("shoal_job_learning_rate", "Learning rate of a job's newest step.", lambda job: job.status.lr),
    _gauge(
        "shoal_job_tokens_per_second",
        "Throughput of a job in tokens (of a task without tokens: in samples) per second.",
        lambda job: job.status.tokens_per_s,
    ),
    _gauge("shoal_job_samples_per_second", "Throughput of a job in samples per second.", _compute_samples_per_s),
    JOB_MFU,
    Metric(
        "shoal_job_step_seconds",
        Kind.HISTOGRAM,
        "Seconds of the steps that a job has computed in all its attempts, repeated ones included.",
        _JOB,
        STEP_BOUNDS_S,
        of_job=lambda job: Histogram.from_buckets(job.step_times.counts, job.step_times.total_s),
    ),
    _gauge(
        "shoal_job_communication_ratio",
        "Share of a job's step time in which ranks wait in collectives; absent on GPUs, where it is not measured.",
        lambda job: job.status.communication_share,
    ),
    _gauge(
        "shoal_job_data_wait_ratio",
        "Share of its time that the rank of a job with the slowest data spends on making batches.",
        lambda job: job.status.data_share,
    ),
    _gauge(
        "shoal_job_goodput_seconds",
        "Worker-seconds that a job requested, by category; productive ones move to another one if their step is "
        "undone.",
        _read_goodput,
        "category",
    ),
    _gauge(
        "shoal_job_recovering_seconds",
        "The category recovering of a job's worker-seconds, by cause.",
        _read_recovering,
        "cause",
    ),
    _gauge(
        "shoal_job_goodput_ratio",
        "Productive share of the worker-seconds that a job requested.",
        lambda job: job.status.goodput.ratio if job.status.goodput else None,
    ),
    _counter("shoal_job_incidents_total", "Incidents of a job.", lambda job: job.status.incidents),
    _counter(
        "shoal_job_steps_lost_total",
        "Completed steps that a job repeated after incidents.",
        lambda job: job.status.steps_lost,
    ),
    _counter(
        "shoal_job_refused_calls_total",
        "Calls of replaced supervisors that the workers of a job have refused; counted from 0 in each attempt.",
        lambda job: job.status.refused_calls,
    ),
    _gauge(
        "shoal_job_snapshot_share",
        "Share of a job's step time that snapshots in memory take.",
        lambda job: job.status.snapshot_share,
    ),
    _gauge(
        "shoal_job_snapshot_every_steps",
        "Steps between two snapshots in memory of a job.",
        lambda job: job.status.snapshot_every_steps,
    ),
    _gauge(
        "shoal_job_snapshots_healthy",
        "1 while every rank of a job has memory for its snapshots, 0 while one has none.",
        lambda job: _read_condition(job.status, ConditionType.SNAPSHOTS_HEALTHY),
    ),
    _gauge(
        "shoal_job_node_loss_steps",
        "Completed steps that a job would lose now if one of its nodes were lost.",
        lambda job: job.status.node_loss.now if job.status.node_loss else None,
    ),
    _gauge(
        "shoal_job_node_loss_max_steps",
        "Completed steps that a job loses at most with one node; absent: not limited by a number of steps.",
        lambda job: job.status.node_loss.at_most if job.status.node_loss else None,
    ),
    _gauge(
        "shoal_job_checkpoint_healthy",
        "1 if a job's last checkpoint could be saved, 0 if it failed or the storage stalls: training goes on without.",
        lambda job: _read_condition(job.status, ConditionType.CHECKPOINT_HEALTHY),
    ),
    _gauge(
        "shoal_job_checkpoint_step",
        "Step of a job's newest committed checkpoint.",
        lambda job: job.status.checkpoint_step,
    ),
    _gauge(
        "shoal_job_checkpoint_timestamp_seconds",
        "When a job's newest checkpoint was committed, Unix time; absent: there is none.",
        lambda job: job.checkpoint.committed_at if job.checkpoint else None,
    ),
    _gauge(
        "shoal_job_checkpoint_last_seconds",
        "Seconds that a job's newest checkpoint took, from the staging of the first rank to the commit.",
        lambda job: job.checkpoint.seconds if job.checkpoint else None,
    ),
    _gauge(
        "shoal_checkpoint_bytes",
        "Size in bytes of a job's newest committed checkpoint.",
        lambda job: job.checkpoint.bytes if job.checkpoint else None,
    ),
    _counter(
        "shoal_job_island_rounds_total",
        "Closed rounds of the islands that a job trains one of; absent for other jobs, as the next two.",
        lambda job: job.island.rounds if job.island else None,
    ),
    _gauge(
        "shoal_job_island_rounds_missed",
        "Closed rounds that an island has missed in a row, up to the newest one; 20 at most.",
        lambda job: job.island.rounds_missed if job.island else None,
    ),
    _gauge(
        "shoal_job_island_waited_seconds",
        "Seconds that the island of a job has waited for rounds since its group formed, as of its newest difference.",
        lambda job: job.island.waited_s if job.island else None,
    ),
    Metric(
        "shoal_worker_info",
        Kind.GAUGE,
        "Always 1: the node that a rank of a job's group is on.",
        (*_RANK, "node_id"),
        of_job=lambda job: {(str(worker.rank), worker.node_id): 1 for worker in job.workers if worker.rank is not None},
    ),
    _gauge(
        "shoal_worker_cpu_cores", "CPUs that a worker keeps busy.", _read_by_rank(lambda use: use.cpu_cores), "rank"
    ),
    _gauge(
        "shoal_worker_resident_bytes",
        "Resident memory of a worker in bytes.",
        _read_by_rank(lambda use: use.resident_bytes),
        "rank",
    ),
    _gauge(
        "shoal_worker_gpu_used_bytes",
        "Used memory of a worker's GPU in bytes, of all processes on it.",
        _read_by_rank(lambda use: use.gpu_bytes - use.gpu_free_bytes if use.gpu_bytes else None),
        "rank",
    ),
    _gauge(
        "shoal_worker_gpu_busy_ratio",
        "Share of the time in which a worker's GPU ran a kernel; needs the package nvidia-ml-py on its node.",
        _read_by_rank(lambda use: use.gpu_busy),
        "rank",
    ),
    _gauge(
        "shoal_worker_gpu_celsius",
        "Temperature of a worker's GPU in degrees Celsius; needs the package nvidia-ml-py on its node.",
        _read_by_rank(lambda use: use.gpu_celsius),
        "rank",
    ),
    _gauge(
        "shoal_worker_gpu_watts",
        "Power in watts that a worker's GPU draws; needs the package nvidia-ml-py on its node.",
        _read_by_rank(lambda use: use.gpu_watts),
        "rank",
    ),
    _gauge(
        "shoal_worker_busy_ratio",
        "Share of its time in which a rank does not wait for others; a straggler's is the highest. Absent on GPUs.",
        _read_by_rank(busy_share),
        "rank",
    ),
    _gauge(
        "shoal_worker_received_bytes_per_second",
        "Bytes a second that a worker's machine receives over its network interfaces, the loopback excluded.",
        _read_by_rank(lambda use: use.received_bytes_s),
        "rank",
    ),
    _gauge(
        "shoal_worker_sent_bytes_per_second",
        "Bytes a second that a worker's machine sends over its network interfaces, the loopback excluded.",
        _read_by_rank(lambda use: use.sent_bytes_s),
        "rank",
    ),
    _gauge(
        "shoal_worker_disk_read_bytes_per_second",
        "Bytes a second that a worker reads from disks.",
        _read_by_rank(lambda use: use.read_bytes_s),
        "rank",
    ),
    _gauge(
        "shoal_worker_disk_written_bytes_per_second",
        "Bytes a second that a worker writes to disks.",
        _read_by_rank(lambda use: use.written_bytes_s),
        "rank",
    ),
    _gauge(
        "shoal_job_phase_ratio",
        "Mean over a job's ranks of the share of time that their training threads spend on a part of the steps.",
        _average_phases,
        "phase",
    ),
)
"""The metrics that are rendered for each live job."""


QUEUE_WAIT_SECONDS = Metric(
    "shoal_queue_wait_seconds",
    Kind.HISTOGRAM,
    "Seconds from the submission of a job to its first start, over all jobs that have started.",
    (),
    (0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400),
)
SCHEDULER_PASS_SECONDS = Metric(
    "shoal_scheduler_pass_seconds",
    Kind.HISTOGRAM,
    "Seconds of the passes of this process's control loop.",
    (),
    _FAST,
)
SCHEDULER_DECIDE_SECONDS = Metric(
    "shoal_scheduler_decide_seconds",
    Kind.HISTOGRAM,
    "Seconds that the scheduling policy took to decide; not every pass asks it.",
    (),
    _FAST,
)

RECOVERY_SECONDS = Metric(
    "shoal_recovery_seconds",
    Kind.HISTOGRAM,
    "Seconds that closed incidents took, by cause and phase; phase recovery is the whole, up to the first new step.",
    ("cause", "phase"),
    (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 30, 60, 300, 1800),
)
INCIDENT_STEPS_LOST = Metric(
    "shoal_incident_steps_lost",
    Kind.HISTOGRAM,
    "Completed steps that were repeated after a closed incident, by cause.",
    ("cause",),
    (0, 1, 2, 5, 10, 25, 50, 100, 500, 1000),
)
INCIDENT_BYTES_MOVED = Metric(
    "shoal_incident_bytes_moved",
    Kind.HISTOGRAM,
    "Bytes that all ranks together read to restore after a closed incident, by cause.",
    ("cause",),
    (2**20, 2**23, 2**26, 2**28, 2**30, 2**32, 2**34, 2**36, 2**38, 2**40),
)
CHECKPOINT_SECONDS = Metric(
    "shoal_checkpoint_seconds",
    Kind.HISTOGRAM,
    "Seconds from the staging of the first rank to the commit of a checkpoint, over all jobs, deleted ones included.",
    (),
    (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)


DATABASE_SECONDS = Metric(
    "shoal_database_seconds",
    Kind.HISTOGRAM,
    "Seconds of this process's transactions, by kind (read, write), with the wait for the database's lock.",
    ("kind",),
    _FAST,
)
WAIT_SECONDS = Metric(
    "shoal_wait_seconds",
    Kind.HISTOGRAM,
    "Seconds for which this process waited for another machine: for a gateway, by the order; for storage, a receiver "
    "of webhooks, and the issuer of tokens.",
    ("what",),
    (0.01, 0.1, 1, 5, 10, 30, 60, 180, 600),
)

WEBHOOK_SECONDS = Metric(
    "shoal_webhook_seconds",
    Kind.HISTOGRAM,
    "Seconds until a receiver had answered an attempt of this process, or the attempt had failed.",
    ("hook",),
    _FAST,
)

HTTP_REQUEST_SECONDS = Metric(
    "shoal_http_request_seconds",
    Kind.HISTOGRAM,
    "Seconds per request by method and route template, without streams and long polls: they last as clients wish.",
    ("method", "route"),
    _FAST,
)
