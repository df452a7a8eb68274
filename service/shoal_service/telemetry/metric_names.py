"""Every metric that Shoal exports: name, kind, help, unit, labels, buckets; for a metric per job also its value.

The collector exports what is declared here; `make docs` lists it. Labels are `job_id`, closed sets of words, and the
projects that have quotas. A renamed metric breaks the dashboards of users, so a test compares them with a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal_service.views import ConditionType, JobStatus


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


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A job that has an attempt: the source of the metrics with the label `job_id`."""

    job_id: str
    granted_workers: int
    checkpoint_bytes: int | None
    """Size of its newest committed checkpoint."""
    status: JobStatus


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending, without +Inf."""
    of_job: Callable[[LiveJob], Mapping[str, float] | float | None] | None = None
    """The value for a job; None: the job has no value yet. A mapping has one value per value of the second label."""


def _condition(status: JobStatus, type_: ConditionType) -> float | None:
    """1: it is true; 0: it is not; None: it is not known."""
    return next((float(condition.status) for condition in status.conditions if condition.type is type_), None)


JOBS = Metric("shoal_jobs", Kind.GAUGE, "Jobs in each state, including ended ones.", ("state",))

_JOB = ("job_id",)
JOB_WORKERS = Metric(
    "shoal_job_workers",
    Kind.GAUGE,
    "World size of a job that has an attempt.",
    _JOB,
    of_job=lambda job: job.status.workers,
)
JOB_DESIRED_WORKERS = Metric(
    "shoal_job_desired_workers",
    Kind.GAUGE,
    "Workers that the scheduler has granted to a job.",
    _JOB,
    of_job=lambda job: job.granted_workers,
)
JOB_STEP = Metric(
    "shoal_job_step", Kind.GAUGE, "Optimizer steps that a job has completed.", _JOB, of_job=lambda job: job.status.step
)
JOB_LOSS = Metric(
    "shoal_job_loss", Kind.GAUGE, "Training loss of a job's newest step.", _JOB, of_job=lambda job: job.status.loss
)
JOB_TOKENS_PER_SECOND = Metric(
    "shoal_job_tokens_per_second",
    Kind.GAUGE,
    "Throughput of a job in tokens (or samples) per second.",
    _JOB,
    of_job=lambda job: job.status.tokens_per_s,
)
JOB_STEPS_LOST = Metric(
    "shoal_job_steps_lost_total",
    Kind.COUNTER,
    "Completed steps that a job repeated after incidents.",
    _JOB,
    of_job=lambda job: job.status.steps_lost,
)
JOB_REFUSED_CALLS = Metric(
    "shoal_job_refused_calls_total",
    Kind.COUNTER,
    "Calls of replaced supervisors that the workers of a job's attempt have refused.",
    _JOB,
    of_job=lambda job: job.status.refused_calls,
)
JOB_GOODPUT_SECONDS = Metric(
    "shoal_job_goodput_seconds",
    Kind.GAUGE,
    "Worker-seconds that a job requested, by category; productive ones move to another one if their step is undone.",
    ("job_id", "category"),
    of_job=lambda job: {c.value: s for c, s in job.status.goodput.seconds.items()} if job.status.goodput else None,
)
JOB_GOODPUT_RATIO = Metric(
    "shoal_job_goodput_ratio",
    Kind.GAUGE,
    "Productive share of the worker-seconds that a job requested.",
    _JOB,
    of_job=lambda job: job.status.goodput.ratio if job.status.goodput else None,
)
JOB_SNAPSHOT_SHARE = Metric(
    "shoal_job_snapshot_share",
    Kind.GAUGE,
    "Share of a job's step time that snapshots in memory take.",
    _JOB,
    of_job=lambda job: job.status.snapshot_share,
)
JOB_SNAPSHOT_EVERY_STEPS = Metric(
    "shoal_job_snapshot_every_steps",
    Kind.GAUGE,
    "Steps between two snapshots in memory of a job.",
    _JOB,
    of_job=lambda job: job.status.snapshot_every_steps,
)
JOB_NODE_LOSS_STEPS = Metric(
    "shoal_job_node_loss_steps",
    Kind.GAUGE,
    "Completed steps that a job would lose now if one of its nodes were lost.",
    _JOB,
    of_job=lambda job: job.status.node_loss.now if job.status.node_loss else None,
)
JOB_NODE_LOSS_MAX_STEPS = Metric(
    "shoal_job_node_loss_max_steps",
    Kind.GAUGE,
    "Completed steps that a job loses at most with one node; absent: not limited by a number of steps.",
    _JOB,
    of_job=lambda job: job.status.node_loss.at_most if job.status.node_loss else None,
)
JOB_GRADIENT_LOG_LAG_STEPS = Metric(
    "shoal_job_gradient_log_lag_steps",
    Kind.GAUGE,
    "Completed steps that the gradient log of a job lacks; absent: no log is in force.",
    _JOB,
    of_job=lambda job: job.status.node_loss.log_lag_steps if job.status.node_loss else None,
)
JOB_GRADIENT_LOG_SHARE = Metric(
    "shoal_job_gradient_log_share",
    Kind.GAUGE,
    "Share of a job's step time that its gradient log takes; absent: no log is in force.",
    _JOB,
    of_job=lambda job: job.status.node_loss.log_share if job.status.node_loss else None,
)
CHECKPOINT_BYTES = Metric(
    "shoal_checkpoint_bytes",
    Kind.GAUGE,
    "Size in bytes of a job's newest committed checkpoint.",
    _JOB,
    of_job=lambda job: job.checkpoint_bytes,
)
JOB_SNAPSHOTS_HEALTHY = Metric(
    "shoal_job_snapshots_healthy",
    Kind.GAUGE,
    "1 while every rank of a job has memory for its snapshots, 0 while one has none: alert on 0.",
    _JOB,
    of_job=lambda job: _condition(job.status, ConditionType.SNAPSHOTS_HEALTHY),
)
JOB_CHECKPOINT_HEALTHY = Metric(
    "shoal_job_checkpoint_healthy",
    Kind.GAUGE,
    "1 if a job's last checkpoint could be saved, 0 if it failed or the storage stalls: training goes on without.",
    _JOB,
    of_job=lambda job: _condition(job.status, ConditionType.CHECKPOINT_HEALTHY),
)
JOB_CHECKPOINT_STEP = Metric(
    "shoal_job_checkpoint_step",
    Kind.GAUGE,
    "Step of a job's newest committed checkpoint.",
    _JOB,
    of_job=lambda job: job.status.checkpoint_step,
)

QUEUE_WAIT_SECONDS = Metric(
    "shoal_queue_wait_seconds",
    Kind.HISTOGRAM,
    "Seconds from the submission of a job to its first start, over all jobs that have started.",
    (),
    (0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400),
)
SCHEDULER_MOVES = Metric(
    "shoal_scheduler_moves_total",
    Kind.COUNTER,
    "Changes of jobs' workers that the scheduler of this process has made, by kind; preempt: it took all of them.",
    ("kind",),
)
PROJECT_WORKERS = Metric(
    "shoal_project_workers",
    Kind.GAUGE,
    "Workers that are granted to the jobs of a project; default includes projects that are not defined.",
    ("project",),
)
PROJECT_SHARE = Metric(
    "shoal_project_share", Kind.GAUGE, "Share of all granted workers that the jobs of a project have.", ("project",)
)
PROJECT_QUEUED_JOBS = Metric("shoal_project_queued_jobs", Kind.GAUGE, "Queued jobs of a project.", ("project",))

INCIDENTS = Metric("shoal_incidents_total", Kind.COUNTER, "Incidents of all jobs, by cause.", ("cause",))
RECOVERY_SECONDS = Metric(
    "shoal_recovery_seconds",
    Kind.HISTOGRAM,
    "Seconds that closed incidents took, by cause and phase; phase recovery is the whole, up to the first new step.",
    ("cause", "phase"),
    (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800),
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
    "Seconds from the staging of the first rank to the commit of a checkpoint, over all jobs.",
    (),
    (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)

LEASE_EPOCH = Metric("shoal_lease_epoch", Kind.GAUGE, "Epoch of the lease on the jobs; rises with each new owner.")
CONTROL_PLANE_LEADER = Metric(
    "shoal_control_plane_leader", Kind.GAUGE, "1 on the control plane that holds the lease, 0 on every other."
)
REPORTS_DROPPED = Metric(
    "shoal_reports_dropped_total",
    Kind.COUNTER,
    "Reports of supervisors that this process did not store, by reason.",
    ("reason",),
)

HTTP_REQUESTS = Metric(
    "shoal_http_requests_total",
    Kind.COUNTER,
    "Finished requests by method, route template and class of status (2xx ...; none: no answer was begun).",
    ("method", "route", "status"),
)
HTTP_REQUEST_SECONDS = Metric(
    "shoal_http_request_seconds",
    Kind.HISTOGRAM,
    "Seconds per request by method and route template; streams and long polls last as long as their clients wait.",
    ("method", "route"),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
)

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""In the order of this file."""
