"""Every metric that Shoal exports: name, kind, help, labels, buckets, and for those of a job how its value is found.

The metrics of each job that has an attempt or has just ended, and of its workers, come first. Their labels are
`job_id`, the rank, closed sets of words, node ids, and names of a task's own metrics. The metrics that are not of one
job follow: jobs in total, queue, incidents, nodes, and the control plane itself.

The exposition shows what is declared here; `make docs` lists it. A renamed metric breaks the dashboards and alerts of
users, so a test compares the names with a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from shoal_service.core.system_metrics import busy_share
from shoal_service.telemetry.metric import STEP_BOUNDS_S, Histogram, Kind, LiveJob, Metric, Values, WorkerSample
from shoal_service.views import ConditionType, JobStatus
from shoal_workers.contract import MAX_METRICS, JobState, StepPart, WorkerUse

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


def _condition(status: JobStatus, type_: ConditionType) -> float | None:
    """1 if the condition is true, 0 if it is false, None if it is not known."""
    return next((float(condition.status) for condition in status.conditions if condition.type is type_), None)


def _samples_per_second(job: LiveJob) -> float | None:
    status = job.status
    if job.spec.program is not None:
        return None  # its batch is its own
    return job.spec.batch.global_size / status.step_s if status.step_s and status.tokens_per_s is not None else None


def _step(job: LiveJob) -> float | None:
    """None if a script has not reported a step."""
    return None if job.spec.script is not None and not job.status.step else job.status.step


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
    """The label of a rank. One object serves all jobs and all scrapes."""
    return (str(rank),)


def _by_rank(of_use: Callable[[WorkerUse], float | None]) -> Callable[[LiveJob], Values]:
    """Makes the function that reads one measurement of each worker of the group, by rank."""

    def values(job: LiveJob) -> Mapping[tuple[str, ...], float]:
        return {
            _label(worker.rank): value
            for worker in job.workers
            if worker.rank is not None and worker.use is not None and (value := of_use(worker.use)) is not None
        }

    return values


def _phases(job: LiveJob) -> Mapping[tuple[str, ...], float] | None:
    shares = [worker.use.phases for worker in job.workers if worker.rank is not None and worker.use is not None]
    known = [share for share in shares if share]
    return (
        {(part.value,): sum(phase.get(part, 0.0) for phase in known) / len(known) for part in StepPart}
        if known
        else None
    )


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
JOB_STEP = _gauge("shoal_job_step", "Optimizer steps that a job has completed.", lambda job: _step(job))
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
    lambda job: None,  # JobSeries computes it from the planner's numbers, which are not part of a job
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
WORKER_GPU_CELSIUS = _gauge(
    "shoal_worker_gpu_celsius",
    "Temperature of a worker's GPU in degrees Celsius; needs the package nvidia-ml-py on its node.",
    _by_rank(lambda use: use.gpu_celsius),
    "rank",
)
WORKER_GPU_WATTS = _gauge(
    "shoal_worker_gpu_watts",
    "Power in watts that a worker's GPU draws; needs the package nvidia-ml-py on its node.",
    _by_rank(lambda use: use.gpu_watts),
    "rank",
)
WORKER_BUSY = _gauge(
    "shoal_worker_busy_ratio",
    "Share of its time in which a rank does not wait for others; a straggler's is the highest. Absent on GPUs.",
    _by_rank(busy_share),
    "rank",
)
WORKER_RECEIVED = _gauge(
    "shoal_worker_received_bytes_per_second",
    "Bytes a second that a worker's machine receives over its network interfaces, the loopback excluded.",
    _by_rank(lambda use: use.received_bytes_s),
    "rank",
)
WORKER_SENT = _gauge(
    "shoal_worker_sent_bytes_per_second",
    "Bytes a second that a worker's machine sends over its network interfaces, the loopback excluded.",
    _by_rank(lambda use: use.sent_bytes_s),
    "rank",
)
WORKER_READ = _gauge(
    "shoal_worker_disk_read_bytes_per_second",
    "Bytes a second that a worker reads from disks.",
    _by_rank(lambda use: use.read_bytes_s),
    "rank",
)
WORKER_WRITTEN = _gauge(
    "shoal_worker_disk_written_bytes_per_second",
    "Bytes a second that a worker writes to disks.",
    _by_rank(lambda use: use.written_bytes_s),
    "rank",
)
JOB_PHASES = _gauge(
    "shoal_job_phase_ratio",
    "Mean over a job's ranks of the share of time that their training threads spend on a part of the steps.",
    _phases,
    "phase",
)

JOBS = Metric("shoal_jobs", Kind.GAUGE, "Jobs in each state, including ended ones.", ("state",))

QUEUE_WAIT_SECONDS = Metric(
    "shoal_queue_wait_seconds",
    Kind.HISTOGRAM,
    "Seconds from the submission of a job to its first start, over all jobs that have started.",
    (),
    (0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400),
)
QUEUE_LONGEST_SECONDS = Metric(
    "shoal_queue_longest_wait_seconds",
    Kind.GAUGE,
    "Seconds for which the job of a project that has been in the queue longest has been there; 0: none is.",
    ("project",),
)
SCHEDULER_MOVES = Metric(
    "shoal_scheduler_moves_total",
    Kind.COUNTER,
    "Changes of jobs' workers that the scheduler of this process has made, by kind; preempt: it took all of them.",
    ("kind",),
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
SCHEDULER_FAILED_PASSES = Metric(
    "shoal_scheduler_failed_passes_total",
    Kind.COUNTER,
    "Passes of this process's control loop that failed: the lease was lost, Ray did not answer, or an error.",
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

INCIDENTS = Metric(
    "shoal_incidents_total",
    Kind.COUNTER,
    "Incidents of all jobs that are over, by cause: while one is open, its cause may be corrected.",
    ("cause",),
)
OPEN_INCIDENTS = Metric(
    "shoal_incidents_open", Kind.GAUGE, "Incidents of all jobs that are not over, by cause so far.", ("cause",)
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

CLUSTER_CONNECTED = Metric(
    "shoal_cluster_connected",
    Kind.GAUGE,
    "1 while a cluster's gateway reports to the service and its Ray head answers the gateway, else 0.",
    ("cluster",),
)
CLUSTER_SILENT = Metric(
    "shoal_cluster_silent_seconds",
    Kind.GAUGE,
    "Seconds since the newest report of a cluster's gateway; absent: none has come.",
    ("cluster",),
)
CLUSTER_NODES = Metric(
    "shoal_cluster_nodes",
    Kind.GAUGE,
    "Nodes of a connected Ray cluster, each in one state.",
    ("cluster", "state"),
)
CLUSTER_RESOURCES = Metric(
    "shoal_cluster_resources",
    Kind.GAUGE,
    "CPUs and GPUs of all live nodes of a connected Ray cluster.",
    ("cluster", "resource"),
)
CLUSTER_FREE_RESOURCES = Metric(
    "shoal_cluster_free_resources",
    Kind.GAUGE,
    "CPUs and GPUs of a connected Ray cluster that nothing has reserved.",
    ("cluster", "resource"),
)
NODE_SHM_BYTES = Metric(
    "shoal_node_shm_bytes", Kind.GAUGE, "Size of /dev/shm of a node on which a worker trains, in bytes.", ("node_id",)
)
NODE_SHM_FREE_BYTES = Metric(
    "shoal_node_shm_free_bytes", Kind.GAUGE, "Free bytes of /dev/shm of a node on which a worker trains.", ("node_id",)
)
NODE_DISK_BYTES = Metric(
    "shoal_node_disk_bytes",
    Kind.GAUGE,
    "Size of the filesystem to which a node's workers save checkpoints (of temporary files if it is none), in bytes.",
    ("node_id",),
)
NODE_DISK_FREE_BYTES = Metric("shoal_node_disk_free_bytes", Kind.GAUGE, "Free bytes of that filesystem.", ("node_id",))

LEASE_EPOCH = Metric("shoal_lease_epoch", Kind.GAUGE, "Epoch of the lease on the jobs; rises with each new owner.")
LEASE_EXPIRY = Metric(
    "shoal_lease_expiry_timestamp_seconds",
    Kind.GAUGE,
    "When the lease on the jobs ends if it is not renewed, Unix time.",
)
CONTROL_PLANE_LEADER = Metric(
    "shoal_control_plane_leader", Kind.GAUGE, "1 on the control plane that holds the lease, 0 on every other."
)
STATE_BYTES = Metric(
    "shoal_state_filesystem_bytes", Kind.GAUGE, "Size of the filesystem of this control plane's state_dir, in bytes."
)
STATE_FREE_BYTES = Metric("shoal_state_filesystem_free_bytes", Kind.GAUGE, "Free bytes of that filesystem.")
BACKUP_AT = Metric(
    "shoal_backup_timestamp_seconds",
    Kind.GAUGE,
    "When `shoal backup` last succeeded with this control plane's state_dir, Unix time; absent: never.",
)
REPORTS_DROPPED = Metric(
    "shoal_reports_dropped_total",
    Kind.COUNTER,
    "Reports of supervisors that this process did not store, by reason.",
    ("reason",),
)
EVENTS = Metric("shoal_events_total", Kind.COUNTER, "Events of jobs that this process has stored.")
DATABASE_SECONDS = Metric(
    "shoal_database_seconds",
    Kind.HISTOGRAM,
    "Seconds of this process's transactions, by kind (read, write), with the wait for the database's lock.",
    ("kind",),
    _FAST,
)
DATABASE_ERRORS = Metric(
    "shoal_database_errors_total", Kind.COUNTER, "Transactions that failed because the database did not answer."
)
WAIT_SECONDS = Metric(
    "shoal_wait_seconds",
    Kind.HISTOGRAM,
    "Seconds for which this process waited for another machine: for a gateway, by the order; for storage, a receiver "
    "of webhooks, and the issuer of tokens.",
    ("what",),
    (0.01, 0.1, 1, 5, 10, 30, 60, 180, 600),
)
WAIT_LIMIT = Metric(
    "shoal_wait_limit_seconds", Kind.GAUGE, "Seconds after which such a wait ends without an answer.", ("what",)
)
WAITS_ENDED = Metric(
    "shoal_waits_ended_total", Kind.COUNTER, "Waits of this process that have ended without an answer.", ("what",)
)
REMOVED = Metric(
    "shoal_removed_total",
    Kind.COUNTER,
    "What this process has deleted on request or by retention: jobs, checkpoints, archives, and rows of logs, series "
    "and events of ended jobs.",
    ("kind",),
)

WEBHOOK_DELIVERIES = Metric(
    "shoal_webhook_deliveries_total",
    Kind.COUNTER,
    "Deliveries of events by this process, by hook (jobs: those of all specs) and outcome; gave_up: events whose "
    "attempts have ended, failed: attempts that are repeated.",
    ("hook", "outcome"),
)
WEBHOOK_SECONDS = Metric(
    "shoal_webhook_seconds",
    Kind.HISTOGRAM,
    "Seconds until a receiver had answered an attempt of this process, or the attempt had failed.",
    ("hook",),
    _FAST,
)
WEBHOOK_LAG_SECONDS = Metric(
    "shoal_webhook_lag_seconds",
    Kind.GAUGE,
    "Age of the oldest event that a receiver has not accepted after a failed attempt; 0: there is none.",
    ("hook",),
)
WEBHOOK_FAILING = Metric(
    "shoal_webhook_failing_jobs", Kind.GAUGE, "Jobs whose events wait after a failed attempt.", ("hook",)
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
    "Seconds per request by method and route template, without streams and long polls: they last as clients wish.",
    ("method", "route"),
    _FAST,
)
HTTP_REFUSED = Metric(
    "shoal_http_refused_total",
    Kind.COUNTER,
    "Requests refused by this process with 429, or 413 for their size, by limit; failures: tokens that were not valid.",
    ("limit",),
)
HTTP_STREAMS = Metric(
    "shoal_http_streams", Kind.GAUGE, "Streams that clients have open: server-sent events and followed logs."
)

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics in the order of this file, in which they are shown."""
OF_JOBS: tuple[Metric, ...] = tuple(metric for metric in ALL if metric.of_job is not None)
"""The metrics that are rendered for each live job."""
