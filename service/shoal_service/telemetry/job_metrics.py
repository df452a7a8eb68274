"""The metrics of each job that has an attempt or has just ended, and of its workers: meaning and value of each.

Labels are `job_id`, the rank, closed sets of words, node ids, and names of a task's own metrics.
`metric_names.ALL` lists these with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from shoal_service.telemetry.metric import Histogram, Kind, LiveJob, Metric, Values, WorkerSample
from shoal_service.telemetry.step_times import STEP_BOUNDS_S
from shoal_service.views import ConditionType, JobStatus
from shoal_workers.contract.job import JobState
from shoal_workers.contract.messages import WorkerUse
from shoal_workers.contract.worker_reports import MAX_METRICS

_JOB = ("job_id",)
_RANK = ("job_id", "rank")
_SHOWN_STATES = [state for state in JobState if state not in (JobState.QUEUED, JobState.PAUSED)]
_ONE_OF_STATES: Mapping[JobState, Values] = {
    now: {(state.value,): int(state is now) for state in _SHOWN_STATES} for now in JobState
}


def _gauge(name: str, help: str, of_job: Callable[[LiveJob], Values], *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, help, (*_JOB, *labels), of_job=of_job)


def _counter(name: str, help: str, of_job: Callable[[LiveJob], Values]) -> Metric:
    return Metric(name, Kind.COUNTER, help, _JOB, of_job=of_job)


def _condition(status: JobStatus, type_: ConditionType) -> float | None:
    """1: it is true; 0: it is not; None: it is not known."""
    return next((float(condition.status) for condition in status.conditions if condition.type is type_), None)


def _samples_per_second(job: LiveJob) -> float | None:
    status = job.status
    return job.spec.batch.global_size / status.step_s if status.step_s and status.tokens_per_s is not None else None


def _goodput(job: LiveJob) -> Mapping[tuple[str, ...], float] | None:
    booked = job.status.goodput
    return {(category.value,): seconds for category, seconds in booked.seconds.items()} if booked else None


def _recovering(job: LiveJob) -> Mapping[tuple[str, ...], float] | None:
    booked = job.status.goodput
    return {(cause.value,): seconds for cause, seconds in booked.recovering.items()} if booked else None


def _task_metrics(job: LiveJob) -> Mapping[tuple[str, ...], float]:
    splits = {"train": job.status.metrics, "validation": job.status.val_metrics}
    return {(name, split): value for split, metrics in splits.items() for name, value in metrics.items()}


@cache
def _label(rank: int) -> tuple[str, ...]:
    """One object for all jobs, and all scrapes."""
    return (str(rank),)


def _by_rank(of_use: Callable[[WorkerUse], float | None]) -> Callable[[LiveJob], Values]:
    """Values of the workers of the group."""

    def values(job: LiveJob) -> Mapping[tuple[str, ...], float]:
        return {
            _label(worker.rank): value
            for worker in job.workers
            if worker.rank is not None and worker.use is not None and (value := of_use(worker.use)) is not None
        }

    return values


def _node_of(worker: WorkerSample) -> tuple[str, ...]:
    return (str(worker.rank), worker.node_id)


JOB_INFO = _gauge(
    "shoal_job_info",
    "Always 1. Join it to give series of a job its name, layout, priority and project.",
    lambda job: {(job.spec.name, job.status.layout, str(job.spec.priority), job.spec.project): 1},
    "name",
    "layout",
    "priority",
    "project",
)
JOB_STATE = _gauge(
    "shoal_job_state",
    "1 for the state that a job is in, 0 for the others.",
    lambda job: _ONE_OF_STATES[job.state],
    "state",
)
JOB_START = _gauge(
    "shoal_job_start_timestamp_seconds", "When a job's first attempt began, Unix time.", lambda job: job.started_at
)
JOB_REPORT = _gauge(
    "shoal_job_report_timestamp_seconds",
    "Time of the newest report of a job's supervisor, Unix time: it stands still if the supervisor is gone.",
    lambda job: job.status.goodput.at if job.status.goodput else None,
)
JOB_ATTEMPTS = _counter(
    "shoal_job_attempts_total", "Attempts of a job: times that it left the queue.", lambda job: job.attempt
)
JOB_WORKERS = _gauge("shoal_job_workers", "World size of a job: workers of its group.", lambda job: job.status.workers)
JOB_DESIRED_WORKERS = _gauge(
    "shoal_job_desired_workers", "Workers that the scheduler has granted to a job.", lambda job: job.granted_workers
)
JOB_MAX_WORKERS = _gauge(
    "shoal_job_max_workers",
    "Workers that a job wants: elasticity.max_workers.",
    lambda job: job.spec.elasticity.max_workers,
)
JOB_STEP = _gauge("shoal_job_step", "Optimizer steps that a job has completed.", lambda job: job.status.step)
JOB_TOTAL_STEPS = _gauge(
    "shoal_job_total_steps", "Optimizer steps after which a job ends.", lambda job: job.status.total_steps
)
JOB_STEP_AT = _gauge(
    "shoal_job_step_timestamp_seconds",
    "When a job completed its newest step, Unix time.",
    lambda job: job.status.step_at,
)
JOB_LOSS = _gauge("shoal_job_loss", "Training loss of a job's newest step.", lambda job: job.status.loss)
JOB_VALIDATION_LOSS = _gauge(
    "shoal_job_validation_loss", "Loss of a job's newest validation.", lambda job: job.status.val_loss
)
JOB_TASK_METRIC = _gauge(
    "shoal_job_task_metric",
    f"Metrics of a job's task in its newest step or validation; at most {MAX_METRICS} names in each.",
    _task_metrics,
    "metric",
    "split",
)
JOB_GRADIENT_NORM = _gauge(
    "shoal_job_gradient_norm",
    "L2 norm of the gradient of a job's newest step, before clipping.",
    lambda job: job.status.grad_norm,
)
JOB_LEARNING_RATE = _gauge(
    "shoal_job_learning_rate", "Learning rate of a job's newest step.", lambda job: job.status.lr
)
JOB_TOKENS_PER_SECOND = _gauge(
    "shoal_job_tokens_per_second",
    "Throughput of a job in tokens (of a task without tokens: in samples) per second.",
    lambda job: job.status.tokens_per_s,
)
JOB_SAMPLES_PER_SECOND = _gauge(
    "shoal_job_samples_per_second", "Throughput of a job in samples per second.", _samples_per_second
)
JOB_MFU = _gauge(
    "shoal_job_mfu_ratio",
    "Model FLOPs utilisation: the planner's FLOPs per token times tokens per second, over the peak of the profile.",
    lambda job: None,  # JobSeries has the planner's numbers, which a job has not
)
JOB_STEP_SECONDS = Metric(
    "shoal_job_step_seconds",
    Kind.HISTOGRAM,
    "Seconds of the steps that a job has computed in all its attempts, repeated ones included.",
    _JOB,
    STEP_BOUNDS_S,
    of_job=lambda job: Histogram.of_buckets(job.step_times.counts, job.step_times.total_s),
)
JOB_COMMUNICATION = _gauge(
    "shoal_job_communication_ratio",
    "Share of a job's step time in which ranks wait in collectives; absent on GPUs, where it is not measured.",
    lambda job: job.status.communication_share,
)
JOB_DATA_WAIT = _gauge(
    "shoal_job_data_wait_ratio",
    "Share of its time that the rank of a job with the slowest data spends on making batches.",
    lambda job: job.status.data_share,
)
JOB_GOODPUT_SECONDS = _gauge(
    "shoal_job_goodput_seconds",
    "Worker-seconds that a job requested, by category; productive ones move to another one if their step is undone.",
    _goodput,
    "category",
)
JOB_RECOVERING_SECONDS = _gauge(
    "shoal_job_recovering_seconds", "The category recovering of a job's worker-seconds, by cause.", _recovering, "cause"
)
JOB_GOODPUT_RATIO = _gauge(
    "shoal_job_goodput_ratio",
    "Productive share of the worker-seconds that a job requested.",
    lambda job: job.status.goodput.ratio if job.status.goodput else None,
)
JOB_INCIDENTS = _counter("shoal_job_incidents_total", "Incidents of a job.", lambda job: job.status.incidents)
JOB_STEPS_LOST = _counter(
    "shoal_job_steps_lost_total",
    "Completed steps that a job repeated after incidents.",
    lambda job: job.status.steps_lost,
)
JOB_REFUSED_CALLS = _counter(
    "shoal_job_refused_calls_total",
    "Calls of replaced supervisors that the workers of a job have refused; counted from 0 in each attempt.",
    lambda job: job.status.refused_calls,
)
JOB_SNAPSHOT_SHARE = _gauge(
    "shoal_job_snapshot_share",
    "Share of a job's step time that snapshots in memory take.",
    lambda job: job.status.snapshot_share,
)
JOB_SNAPSHOT_EVERY_STEPS = _gauge(
    "shoal_job_snapshot_every_steps",
    "Steps between two snapshots in memory of a job.",
    lambda job: job.status.snapshot_every_steps,
)
JOB_SNAPSHOTS_HEALTHY = _gauge(
    "shoal_job_snapshots_healthy",
    "1 while every rank of a job has memory for its snapshots, 0 while one has none.",
    lambda job: _condition(job.status, ConditionType.SNAPSHOTS_HEALTHY),
)
JOB_NODE_LOSS_STEPS = _gauge(
    "shoal_job_node_loss_steps",
    "Completed steps that a job would lose now if one of its nodes were lost.",
    lambda job: job.status.node_loss.now if job.status.node_loss else None,
)
JOB_NODE_LOSS_MAX_STEPS = _gauge(
    "shoal_job_node_loss_max_steps",
    "Completed steps that a job loses at most with one node; absent: not limited by a number of steps.",
    lambda job: job.status.node_loss.at_most if job.status.node_loss else None,
)
JOB_GRADIENT_LOG_LAG_STEPS = _gauge(
    "shoal_job_gradient_log_lag_steps",
    "Completed steps that the gradient log of a job lacks; absent: no log is in force.",
    lambda job: job.status.node_loss.log_lag_steps if job.status.node_loss else None,
)
JOB_GRADIENT_LOG_SHARE = _gauge(
    "shoal_job_gradient_log_share",
    "Share of a job's step time that its gradient log takes; absent: no log is in force.",
    lambda job: job.status.node_loss.log_share if job.status.node_loss else None,
)
JOB_CHECKPOINT_HEALTHY = _gauge(
    "shoal_job_checkpoint_healthy",
    "1 if a job's last checkpoint could be saved, 0 if it failed or the storage stalls: training goes on without.",
    lambda job: _condition(job.status, ConditionType.CHECKPOINT_HEALTHY),
)
JOB_CHECKPOINT_STEP = _gauge(
    "shoal_job_checkpoint_step", "Step of a job's newest committed checkpoint.", lambda job: job.status.checkpoint_step
)
JOB_CHECKPOINT_AT = _gauge(
    "shoal_job_checkpoint_timestamp_seconds",
    "When a job's newest checkpoint was committed, Unix time; absent: there is none.",
    lambda job: job.checkpoint.committed_at if job.checkpoint else None,
)
JOB_CHECKPOINT_LAST_SECONDS = _gauge(
    "shoal_job_checkpoint_last_seconds",
    "Seconds that a job's newest checkpoint took, from the staging of the first rank to the commit.",
    lambda job: job.checkpoint.seconds if job.checkpoint else None,
)
CHECKPOINT_BYTES = _gauge(
    "shoal_checkpoint_bytes",
    "Size in bytes of a job's newest committed checkpoint.",
    lambda job: job.checkpoint.bytes if job.checkpoint else None,
)

WORKER_INFO = Metric(
    "shoal_worker_info",
    Kind.GAUGE,
    "Always 1: the node that a rank of a job's group is on.",
    (*_RANK, "node_id"),
    of_job=lambda job: {_node_of(worker): 1 for worker in job.workers if worker.rank is not None},
)
WORKER_CPUS = _gauge(
    "shoal_worker_cpu_cores", "CPUs that a worker keeps busy.", _by_rank(lambda use: use.cpu_cores), "rank"
)
WORKER_MEMORY = _gauge(
    "shoal_worker_resident_bytes",
    "Resident memory of a worker in bytes.",
    _by_rank(lambda use: use.resident_bytes),
    "rank",
)
WORKER_GPU_MEMORY = _gauge(
    "shoal_worker_gpu_used_bytes",
    "Used memory of a worker's GPU in bytes, of all processes on it.",
    _by_rank(lambda use: use.gpu_bytes - use.gpu_free_bytes if use.gpu_bytes else None),
    "rank",
)
WORKER_GPU_BUSY = _gauge(
    "shoal_worker_gpu_busy_ratio",
    "Share of the time in which a worker's GPU ran a kernel; needs the package nvidia-ml-py on its node.",
    _by_rank(lambda use: use.gpu_busy),
    "rank",
)
