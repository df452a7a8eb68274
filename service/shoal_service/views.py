"""The resources of the REST API about jobs, and the bodies of requests that change one.

The store and the supervisor make them; the HTTP edge, the command line and the Python client show them. Pure data: no
method here reads or decides anything. Histories are columns of equal length, because a page draws them and rows would
repeat every name. `fleet_views` has what is not about one job, `access_views` tokens, sessions and the audit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field, model_validator

from shoal_service.core.alerts import AlertView
from shoal_service.core.endings import LostAttempt
from shoal_service.core.events import Severity
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.node_loss import NodeLossBound, WorkerLossBound
from shoal_service.core.parity import Parity
from shoal_service.core.scheduling.explaining import GrowthLimit
from shoal_service.core.system_metrics import SystemMetric
from shoal_workers.contract import (
    ANY_CLUSTER,
    CLUSTER_PATTERN,
    MAX_CHANGED_WEIGHTS,
    MAX_STEPS,
    SWEEP_NAME,
    CheckpointName,
    Frozen,
    IncidentCause,
    JobSpec,
    JobState,
    LayoutProof,
    LogStream,
    Moment,
    Overlap,
    ParallelismSpec,
    Phase,
    ProfileFile,
    Stacks,
    Standing,
    StateSource,
    StepTimes,
    StopSpec,
    Suspect,
    UserFailure,
    Weight,
    WorkerUse,
)
from shoal_workers.contract.profiles import Category as StepCategory
from shoal_workers.contract.webhooks import Alerts


class QueuePlace(Frozen):
    """Where a queued job stands, as the scheduler explained it last."""

    position: int
    """Place in the order in which jobs would start; 1 is next."""
    reason: str
    """What is missing, who has it, and the way out."""
    holders: tuple[str, ...] = ()
    """Ids of jobs that hold what is waited for; at most 16."""
    expected_at: float | None = None
    """When the job is expected to start; null: not known."""
    decided_at: float
    """When the scheduler explained this."""
    waiting_since: float | None = None
    """When the job last entered the queue."""


class GrowthAnswer(Frozen):
    """Why the scheduler grants a running job fewer workers than its `elasticity.max_workers`."""

    limit: GrowthLimit
    """The limit, for programs."""
    reason: str
    """For people: what growing would bring and cost, who has the workers, and the way out."""
    max_workers: int
    decided_at: float
    """When the scheduler answered this."""


class ConditionType(StrEnum):
    WORKERS_READY = "WorkersReady"
    """The group has all workers that the scheduler has granted."""
    PROGRESSING = "Progressing"
    """The ranks make progress. False while they stand still for unusually long; they may count as hung soon."""
    SNAPSHOTS_HEALTHY = "SnapshotsHealthy"
    """Every rank has memory for its snapshots; false: a death costs the steps since the last checkpoint."""
    CHECKPOINT_HEALTHY = "CheckpointHealthy"
    """The last checkpoint could be saved."""


class WorkerState(StrEnum):
    STARTING = "starting"
    WARM = "warm"
    """It has loaded the task and waits for a group."""
    TRAINING = "training"
    STOPPING = "stopping"
    """Its node is drained, or it has received a preemption notice."""


class CheckpointState(StrEnum):
    COMMITTED = "committed"
    DAMAGED = "damaged"
    """It failed its verification."""
    DELETED = "deleted"
    """Retention or a user deleted it."""
    FAILED = "failed"
    """It could not be written."""


class Condition(Frozen):
    """One aspect of a job that is true or false, with the reason, as in Kubernetes."""

    type: ConditionType
    status: bool
    reason: str
    message: str
    since: float
    """Wall-clock time of the last change of `status`."""


class WorkerView(Frozen):
    """One worker of a job."""

    worker_id: str
    rank: int | None
    """null: a standby, or a new worker that is not in the group yet."""
    state: WorkerState
    node_id: str
    node_ip: str
    pid: int
    generation: int
    phase: Phase
    """What its training thread does."""
    step: int
    use: WorkerUse | None = None
    """What its process and its host use, measured every 5 s; null: not measured yet."""


class CodeView(Frozen):
    """The version of a job's code, by the first 12 characters of its SHA-256."""

    version: str
    """The one that trains."""
    updating_to: str = ""
    """The one that takes over or has just taken over; empty: no update is under way."""
    update: str = ""
    """`warming`: its workers start; `trial`: it trains its first steps, and can still be rolled back."""


class JobStatus(Frozen):
    """The state of a job, which supervisors, the scheduler and the store write. Users write only the spec."""

    state: JobState = JobState.QUEUED
    reason: str = ""
    """For programs: an end reason if the job or its last attempt has ended; otherwise what the state waits for."""
    message: str = ""
    """The reason in words, for people."""
    deadline: float | None = None
    """Wall-clock time until which the attempt waits for what `note` says; progress of that moves it on. null: it waits
    for nothing, or without a limit."""
    observed_generation: int = 0
    """The version of the spec that the supervisor works with."""
    attempt: int = 0
    cluster: str = ""
    """Cluster in which this attempt has begun; empty: there was none, or an earlier release has begun it."""
    generation: int = 0
    """Number of the group in the attempt. It is not the version of the spec."""
    workers: int = 0
    """Workers of the group now."""
    desired_workers: int = 0
    """Workers that the scheduler has granted."""
    code: CodeView | None = None
    """null: the job has no code of its own, or no attempt yet."""
    held_back: GrowthAnswer | None = None
    """Why these are fewer than `elasticity.max_workers`; null: they are not, or the job has no workers."""
    layout: str = ""
    layout_reason: str = ""
    """Why it was planned; with more than one worker also whether each has the whole state or a shard, and why."""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    """The task's own metrics in the newest step, by name: means over the global batch, as the loss."""
    val_metrics: dict[str, float] = Field(default_factory=dict)
    """Those of the newest validation."""
    best: Standing | None = None
    """The best validations so far, and how many there were since; null: there was none."""
    tokens_per_s: float | None = None
    tokens: int | None = 0
    """Tokens, or samples, of all completed steps; null: a script does not report them."""
    grad_norm: float | None = None
    """L2 norm of the gradient of the newest step, before clipping."""
    lr: float | None = None
    """Learning rate of the newest step."""
    step_s: float | None = None
    """Seconds of a step at the current world size; moving average."""
    step_at: float | None = None
    """When the newest step was completed, by the clock of rank 0; null: this attempt has reported none. If `step` is 0
    then, a script has never reported one."""
    communication_share: float | None = None
    """Share of a step in which the ranks wait in collectives, for each other or for the network; moving average. null:
    it was not measured yet, or the job trains on GPUs, where such waiting is not seen."""
    data_share: float | None = None
    """Share of its time that the rank with the slowest data spends on making batches; moving average."""
    steps_lost: int = 0
    incidents: int = 0
    checkpoint_step: int | None = None
    """Step of the newest committed checkpoint."""
    verified_step: int | None = None
    """Newest step after which all ranks were found to hold the same state; null: they were not compared. After a
    difference only checkpoints of this step and earlier ones are restored."""
    num_parameters: int | None = None
    proofs: tuple[LayoutProof, ...] = ()
    """Proofs of the layouts that the attempt has used or tried, two steps split against whole."""
    eta_s: float | None = None
    note: str = ""
    """For people: what the attempt waits for, and how far that is; while it trains, what it saves or validates, that
    its ranks stand still, or why it has fewer workers than granted."""
    failure: UserFailure | None = None
    conditions: tuple[Condition, ...] = ()
    alerts: tuple[AlertView, ...] = ()
    """Those of the spec, and whether each holds."""
    goodput: Goodput | None = None
    refused_calls: int = 0
    """Calls of a replaced supervisor that this attempt's workers have refused."""
    snapshot_every_steps: float | None = None
    """Steps between two snapshots in memory; null: not known yet, or snapshots are off."""
    snapshot_share: float | None = None
    """Share of the step time that snapshots in memory take."""
    node_loss: NodeLossBound | None = None
    """What the loss of one node would cost; null: no group has formed yet."""
    worker_loss: WorkerLossBound | None = None
    """What an unexpected death of workers would cost, if no machine is lost; null: not known yet."""
    lost: LostAttempt | None = None
    """The last attempt, if it was lost with its Ray cluster; null once a step was completed since."""


class JobView(Frozen):
    """A job: the user's spec, and the system's status."""

    id: str
    name: str
    spec: JobSpec
    spec_version: int
    """Rises by 1 with each accepted change of the spec; `status.observed_generation` follows."""
    etag: str
    created_at: float
    updated_at: float
    started_at: float | None = None
    ended_at: float | None = None
    archived_at: float | None = None
    """null: the job is in the lists of jobs."""
    status: JobStatus
    queue: QueuePlace | None = None
    """null: the job is not in the queue, or the scheduler has not considered it yet."""


class ListedJob(Frozen):
    """What every list says of a job."""

    id: str
    name: str
    state: JobState
    reason: str = ""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    incidents: int = 0
    goodput: float | None = None
    """Share of the requested worker-seconds that was productive; null: nothing is booked yet."""
    workers: int = 0
    desired_workers: int = 0
    priority: int = 0
    project: str = "default"
    user: str = "default"
    cluster: str = ""
    """Cluster in which its newest attempt has begun; empty: there was none."""
    queue_position: int | None = None
    """1 starts next; null: not in the queue, or not considered yet."""
    created_at: float
    updated_at: float
    values: dict[str, Any] = Field(default_factory=dict)
    """What the parameter `columns` asks for, by name; a name without a value is left out."""


class JobSummary(ListedJob):
    """An entry of the list of jobs."""

    note: str = ""
    """What the job does beside its steps, or waits for; for people."""


class EventView(Frozen):
    """One entry of a job's history, which has no gaps."""

    seq: int
    """1, 2, 3 ... per job."""
    at: float
    type: str
    """Dotted, for example job.created; docs/reference/events.md lists all. Later versions may add types."""
    severity: Severity
    message: str
    """One line for people."""
    data: dict[str, Any] = Field(default_factory=dict)
    """The fields of this type, see docs/reference/events.md. Later versions may add fields."""


class IncidentView(Frozen):
    """A failure, and what it cost.

    `detect_s` ends at `at`, when the supervisor learnt of the failure. It begins when the worker died, as its node saw
    it (20-40 ms late, by the clock of Ray's head). If that is not known (the node died too, the worker hangs, or its
    link is cut), `detect_s` begins with the last sign of life before: the report of a survivor whose collective broke,
    or a progress stamp of the lost worker. Then `detect_s` is an upper bound.
    """

    id: int
    """Counts within the attempt."""
    attempt: int = 0
    """Filled in by the store."""
    cause: IncidentCause
    witness: str
    ranks: tuple[int, ...]
    worker_ids: tuple[str, ...]
    node_id: str = ""
    generation: int
    """The generation that failed."""
    at: float
    from_workers: int
    to_workers: int | None = None
    detect_s: float | None = None
    quiesce_s: float | None = None
    plan_s: float | None = None
    form_s: float | None = None
    restore_s: float | None = None
    first_step_s: float | None = None
    recovery_s: float | None = None
    """Seconds from `at` to the end of the first completed step of the next generation."""
    state_source: StateSource | None = None
    """Where the next group took its state from."""
    bytes_moved: int | None = None
    """Bytes that all ranks together read to restore their state."""
    steps_lost: int | None = None
    from_layout: str = ""
    to_layout: str | None = None
    action: str = ""
    """How Shoal recovered; see docs/elastic.md."""
    closed: bool = False
    message: str = ""
    node_loss: NodeLossBound | None = None
    """A node was lost: what that cost at most, by the bound that was in force."""
    stacks: Stacks | None = None
    """What every rank did when the group stood still, before it was interrupted; null: they were not taken."""
    suspect: Suspect | None = None
    """The most probable reason, with its evidence; null: nothing names one."""


class CheckpointView(Frozen):
    """A durable checkpoint. One of each (step, attempt, generation)."""

    step: int
    url: str
    state: CheckpointState
    bytes: int = 0
    seconds: float = 0.0
    """Seconds from the staging of the first rank to the commit."""
    stall_s: float = 0.0
    committed_at: float | None = None
    attempt: int
    generation: int
    world_size: int = 0
    message: str = ""
    pinned: bool = False
    """Retention does not delete it."""
    score: float | None = None
    """Its `validation.metric`, if it is one of the best checkpoints."""
    best: int | None = None
    """1: no validation was better; null: it is not one of the best that `checkpoint.keep_best` keeps."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's directory."""
        return str(CheckpointName(self.step, self.attempt, self.generation))


class LogView(Frozen):
    """A line of a job's log: what a worker has printed, or what happened to the job."""

    seq: int
    at: float
    rank: int | None
    worker_id: str
    """Empty: a line of the job itself; its stream is `shoal`."""
    stream: LogStream
    text: str
    attempt: int | None = None
    """The attempt in which it was written, 0 before the first; null: an earlier release has stored it."""


class ParityView(Parity):
    """How far the losses of two jobs differ, step by step; usually one had incidents and the other had none."""

    job_id: str
    against_id: str


T = TypeVar("T")


class Page(Frozen, Generic[T]):
    items: tuple[T, ...]
    next_cursor: str | None = None
    """Opaque: pass it as `cursor` for the next page; null: this is the last."""


class SeriesColumns(Frozen):
    """Completed steps, or means over equal numbers of steps, rounded to 6 digits. Values that are not finite, or that a
    script has not reported, are null."""

    step: tuple[int, ...] = ()
    at: tuple[float, ...] = ()
    loss: tuple[float | None, ...] = ()
    val_loss: tuple[float | None, ...] = ()
    grad_norm: tuple[float | None, ...] = ()
    lr: tuple[float | None, ...] = ()
    tokens_per_s: tuple[float | None, ...] = ()
    step_s: tuple[float, ...] = ()
    world_size: tuple[int, ...] = ()
    generation: tuple[int, ...] = ()
    metrics: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    """The task's own metrics in training, by name; null where a step has no value."""
    val_metrics: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)


class SampleColumns(Frozen):
    """The job's accounts over time: world size wanted, granted and had, and worker-seconds by category since the
    submission."""

    at: tuple[float, ...] = ()
    step: tuple[int, ...] = ()
    state: tuple[JobState, ...] = ()
    wanted: tuple[int, ...] = ()
    """`elasticity.max_workers`."""
    granted: tuple[int, ...] = ()
    workers: tuple[int, ...] = ()
    seconds: dict[Category, tuple[float, ...]] = Field(default_factory=dict)


class SystemColumns(Frozen):
    """One system metric of a job's ranks over time: means over equal intervals."""

    metric: SystemMetric
    width_s: float = 0.0
    """Length of the intervals, seconds; 0: nothing is stored. Jobs with many ranks have fewer samples."""
    at: tuple[float, ...] = ()
    """End of each interval, wall-clock time."""
    generation: tuple[int, ...] = ()
    """The generation at that time. A rank may be another worker in each."""
    ranks: tuple[int, ...] = ()
    values: tuple[tuple[float | None, ...], ...] = ()
    """For each rank its value in each interval; null: not measured, or there was no such rank."""
    metrics: tuple[SystemMetric, ...] = ()
    """The metrics that the newest sample of the job has."""


class JobOverview(Frozen):
    """Everything that a page about one job shows, except its log."""

    job: JobView
    series: SeriesColumns
    samples: SampleColumns
    incidents: tuple[IncidentView, ...]
    """The newest 100, oldest first."""
    workers: tuple[WorkerView, ...]
    events: tuple[EventView, ...]
    """The newest 100, oldest first."""
    checkpoints: tuple[CheckpointView, ...]
    """The newest 50, oldest first."""


class SpecVersion(Frozen):
    """A version of a job's spec."""

    version: int
    accepted_at: float
    spec: JobSpec
    yaml: str = ""
    """The keys that differ from their defaults, as YAML that can be submitted."""


class VerificationState(StrEnum):
    RUNNING = "running"
    WHOLE = "whole"
    """Every file has the length and the checksum that its marker names."""
    DAMAGED = "damaged"
    """A file differs. The checkpoint's state is `damaged` from now on."""
    MISSING = "missing"
    """Its marker is not in the storage: it was deleted meanwhile, or not by Shoal."""
    FAILED = "failed"
    """The storage did not answer; nothing is known."""


class VerificationView(Frozen):
    """The verification of a checkpoint: every byte is read once, and compared with its marker."""

    name: str
    state: VerificationState
    bytes_read: int = 0
    bytes: int = 0
    """Bytes of all files; 0: not known yet."""
    seconds: float = 0.0
    """Seconds since it began."""
    message: str = ""
    """What differs, or why it failed."""


class ProfileState(StrEnum):
    REQUESTED = "requested"
    """The worker profiles from its next step boundary, or no group trains at the moment."""
    DONE = "done"
    FAILED = "failed"


class ProfileBody(Frozen):
    """A request to profile one rank of a running job."""

    steps: int = Field(default=3, ge=1, le=MAX_STEPS)
    """Steps to profile."""
    rank: int = Field(default=0, ge=0, le=10_000_000)


class ProfileView(Frozen):
    """One profile of a job: requested, done, or failed with a reason."""

    number: int
    """Number among the job's profiles, from 1. The newest 8 are kept."""
    state: ProfileState
    rank: int
    steps: int
    """Requested steps."""
    requested_at: float
    ended_at: float | None = None
    attempt: int
    generation: int | None = None
    """Generation in which it was taken; null: not yet, or in none."""
    reason: str = ""
    """Why it failed."""
    note: str = ""
    """Why a file is missing, or why there are fewer steps than requested."""
    times: tuple[StepTimes, ...] = ()
    """Where the time of each profiled step went; the categories add up to its length."""
    files: tuple[ProfileFile, ...] = ()
    """The trace in Chrome's format, for chrome://tracing or ui.perfetto.dev, and the timeline of memory."""
    peak_bytes: int | None = None
    """Most memory that tensors took: on a GPU in all, on a CPU beyond what they took when the profile began."""
    overlaps: tuple[Overlap, ...] = ()
    """By axis, the longest first: collectives in the profiled steps, and how much of them computing hid."""
    held_s: float = 0.0
    """Seconds for which the start and the end of the profile kept the worker from training."""

    @property
    def step_s(self) -> float:
        """Mean length of a profiled step, seconds; 0: there is none."""
        return sum(time.total_s for time in self.times) / max(1, len(self.times))

    def mean_s(self, category: StepCategory) -> float:
        """Mean seconds of a profiled step in one category."""
        return sum(time.seconds.get(category, 0.0) for time in self.times) / max(1, len(self.times))


class WebhookView(Frozen):
    """What one hook has delivered, for one job or for all of them, and what it waits for."""

    hook: str
    """`service/NAME`: of the service's settings; `job/N`: number N of the job's spec, from 0."""
    job_id: str | None
    """null: all jobs together."""
    receiver: str
    """Scheme, host and port of the URL."""
    events: tuple[str, ...]
    """The types of events that it selects."""
    delivered: int = 0
    """Events that the receiver has accepted."""
    gave_up: int = 0
    """Events that were given up, because the receiver has not accepted them for too long."""
    failing: int = 0
    """Jobs whose events wait after a failed attempt."""
    waiting_since: float | None = None
    """Time of the oldest event that waits after a failed attempt; null: none does."""
    failing_since: float | None = None
    """First failed attempt since the last success of the job concerned, the earliest of all."""
    next_at: float | None = None
    """The next attempt after a failed one."""
    delivered_at: float | None = None
    """The last success."""
    error: str = ""
    """Error of the last failed attempt; empty if nothing waits."""


class ElasticityPatch(Frozen):
    """Changes of the key `elasticity`. Absent keys stay as they are."""

    min_workers: int | None = Field(None, ge=1, le=100_000)
    max_workers: int | None = Field(None, ge=1, le=100_000)
    standby: int | None = Field(None, ge=0, le=1_000)
    wait_s: float | None = Field(None, gt=0, le=30 * 86400, allow_inf_nan=False)


class SchedulePatch(Frozen):
    """Changes of the key `schedule`. Absent keys stay as they are."""

    name: Literal["cosine", "linear", "constant"] | None = None
    warmup_steps: int | None = Field(None, ge=0, le=2**53)
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    steps: int | None = Field(None, ge=1, le=2**53)
    """null: the decay ends with the last step."""


class ValidationPatch(Frozen):
    """Changes of the key `validation`. Absent keys stay as they are."""

    every_steps: int | None = Field(None, ge=1, le=2**53)
    """null: only after the last step."""
    samples: int | None = Field(None, ge=0, le=2**53)
    metric: str | None = Field(None, min_length=1, max_length=63)
    mode: Literal["auto", "min", "max"] | None = None
    patience: int | None = Field(None, ge=1, le=2**53)
    """null: never stop early."""
    min_delta: float | None = Field(None, ge=0, allow_inf_nan=False)


class OptimizerPatch(Frozen):
    """Changes of the key `optimizer`."""

    lr: float | None = Field(None, gt=0, le=1e3, allow_inf_nan=False)


class DataPatch(Frozen):
    """Other weights for the sources of a mixture, from a step on. They are added to the spec's `data.changes`."""

    weights: dict[str, Weight] = Field(min_length=1, max_length=MAX_CHANGED_WEIGHTS)
    """A weight for each source of `data.sources`, by its `name`, or by its `path` if it has no name; 0: it is not read
    any more. Each source goes on with its next sample."""
    at_step: int | None = Field(None, ge=1, le=2**53)
    """The first step with these weights; null: the first one of which all workers learn in time, which the answer
    names in `spec.data.changes`. Changes that were planned for it or for later steps give way."""


class WorkerPatch(Frozen):
    """Changes of the key `worker`."""

    cluster: str = Field(pattern=CLUSTER_PATTERN)
    """Where the job shall run; `any`: the cluster that the scheduler chooses. An attempt elsewhere saves and ends, and
    the job goes on there."""


class CodePatch(Frozen):
    """New code for the job: one of the keys. What the job is named after and its variables stay as they are."""

    working_dir: str | None = Field(None, max_length=4096)
    """A directory. The client packs and uploads it; without a client it is one on the server's machine."""
    archive: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The sha256 of an uploaded archive (`PUT /v1/code/{sha256}`)."""

    @model_validator(mode="after")
    def _is_one(self) -> CodePatch:
        if (self.working_dir is None) == (self.archive is None):
            raise ValueError('code has exactly one of working_dir and archive, for example {"working_dir": "./task"}.')
        return self


class JobPatch(Frozen):
    """Changes of a job's spec. Absent keys stay as they are. Only `name`, `labels` and `annotations` of a job that has
    ended can be changed."""

    name: str | None = None
    elasticity: ElasticityPatch | None = None
    parallelism: Literal["auto"] | ParallelismSpec | None = None
    """Replaces all of `parallelism`: keys that are left out get their defaults. A running group takes the new layout
    at its next step boundary."""
    priority: int | None = Field(None, ge=-1000, le=1000)
    finish_by: Moment | None = None
    """A new deadline."""
    stop: StopSpec | None = None
    """Replaces all of `stop`. This key and the next three take effect at the next step boundary, and no step is lost.
    With fewer steps than are done, the job ends there."""
    schedule: SchedulePatch | None = None
    validation: ValidationPatch | None = None
    optimizer: OptimizerPatch | None = None
    data: DataPatch | None = None
    code: CodePatch | None = None
    """New code. Workers with it start beside the others and take over at a step boundary. If it fails, or builds
    another model, the job trains on with the code before, which is then that of the spec again."""
    worker: WorkerPatch | None = None
    labels: dict[str, str | None] | None = Field(None, max_length=64)
    """Merged by name; null removes one. The rules for names and values are those of the spec."""
    annotations: dict[str, str | None] | None = Field(None, max_length=64)
    """Merged as labels."""
    alerts: Alerts | None = None
    """Replaces all of `alerts`. Training is not touched."""


class ExtendRequest(Frozen):
    """The request to let a job go on to more steps."""

    steps: int = Field(ge=1, le=2**53)
    """Optimizer steps that it is to complete in all."""


class TakeRequest(Frozen):
    """The request to go on from an older checkpoint."""

    step: int = Field(ge=0, le=2**53)
    """Step of a good checkpoint of the job; 0: it starts over."""


class MoveRequest(Frozen):
    """The request to run a job in another cluster."""

    to: str = Field(pattern=CLUSTER_PATTERN)
    """Name of the cluster; `any`: the one that the scheduler chooses, and an attempt stays where it is."""
    at_once: bool = False
    """End an attempt elsewhere now, although the job may have to wait there. False: it trains on until it would start
    there."""

    @model_validator(mode="after")
    def _moves(self) -> MoveRequest:
        if self.at_once and self.to == ANY_CLUSTER:
            raise ValueError("at_once needs the name of a cluster: with any, an attempt stays where it is.")
        return self


class SweepRange(Frozen):
    """Numbers that are drawn at random."""

    low: float
    high: float
    scale: Literal["linear", "log"] = "linear"
    """log: each order of magnitude is as likely; `low` must be larger than 0."""
    whole: bool = False
    """Whole numbers only, with both ends."""


class SweepRequest(Frozen):
    """The request for a sweep: a job for each combination of the values of a grid, or for each of `samples` draws at
    random; all or none."""

    name: str | None = Field(None, pattern=SWEEP_NAME)
    """Name of the sweep, in its project; null: one is made from the name of the spec. The same request again submits
    nothing twice."""
    spec: dict[str, Any]
    """The job spec that the jobs share. Their names are its name and a number."""
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict, max_length=16)
    """Path of keys (`optimizer.lr`) -> the values of this key, all different; the last path changes fastest. Text is
    read as in `--set`: "3e-4" is a number, and the job's label has it as it is written."""
    ranges: dict[str, SweepRange] = Field(default_factory=dict, max_length=16)
    """Path of keys -> the numbers from which those of this key are drawn. It needs `samples`."""
    samples: int | None = Field(None, ge=1, le=1_000)
    """Number of jobs, each with values that are drawn from `ranges` and from the lists of `grid`; null: every
    combination of the grid. A larger number continues the sweep."""
    seed: int = Field(0, ge=0, le=2**53)
    """Seed of the draws: the same seed gives the same values."""
    limit: int | None = Field(None, ge=1, le=100_000)
    """`sweep.limit` of each job."""
    prune: Literal["median", "halving"] | None = None
    """`sweep.prune` of each job."""
    warmup_steps: int | None = Field(None, ge=1, le=2**53)
    """`sweep.warmup_steps` of each job; null: its default."""
    reduction: int | None = Field(None, ge=2, le=100)
    """`sweep.reduction` of each job; null: its default."""

    @model_validator(mode="after")
    def _varies_something(self) -> SweepRequest:
        if not self.grid and not self.ranges:
            raise ValueError("a sweep needs grid or ranges, for example grid: {optimizer.lr: [1e-4, 3e-4]}")
        if self.ranges and self.samples is None:
            raise ValueError("ranges are drawn at random: samples, the number of jobs, is missing")
        return self
