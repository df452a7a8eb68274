"""The resources of the REST API. The store and the supervisor make them, the HTTP edge, the command line and the Python
client show them. Pure data: no method here reads or decides anything.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar

from pydantic import Field

from shoal_service.change_views import CodePatch as CodePatch
from shoal_service.change_views import ElasticityPatch as ElasticityPatch
from shoal_service.change_views import ExtendRequest as ExtendRequest
from shoal_service.change_views import JobPatch as JobPatch
from shoal_service.change_views import MoveRequest as MoveRequest
from shoal_service.change_views import OptimizerPatch as OptimizerPatch
from shoal_service.change_views import SchedulePatch as SchedulePatch
from shoal_service.change_views import ValidationPatch as ValidationPatch
from shoal_service.change_views import WorkerPatch as WorkerPatch
from shoal_service.core.downsampling import SeriesPoint as SeriesPoint
from shoal_service.core.events.base import Severity
from shoal_service.core.goodput import Goodput as Goodput
from shoal_service.core.lost_attempt import LostAttempt
from shoal_service.core.node_loss import NodeLossBound, WorkerLossBound
from shoal_service.core.nodes import Cordon, Drain, Node
from shoal_service.core.parity import Parity
from shoal_service.core.parity import ParityPoint as ParityPoint
from shoal_service.core.parity import SpecDifference as SpecDifference
from shoal_service.queue_views import GrowthAnswer, QueuePlace
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.job import IncidentCause, JobState, StateSource, UserFailure
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import LogStream, Phase, WorkerUse
from shoal_workers.contract.messages import Stacks as Stacks
from shoal_workers.contract.proofs import LayoutProof
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.suspects import Suspect
from shoal_workers.contract.validation import Standing as Standing

T = TypeVar("T")


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
    """By retention, or by a user."""
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
    tokens: int = 0
    grad_norm: float | None = None
    """L2 norm of the gradient of the newest step, before clipping."""
    lr: float | None = None
    """Learning rate of the newest step."""
    step_s: float | None = None
    """Seconds of a step at the current world size; moving average."""
    step_at: float | None = None
    """When the newest step was completed, by the clock of rank 0."""
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
    """Proofs of the layouts that the attempt has used or tried, one micro-batch split against whole."""
    eta_s: float | None = None
    note: str = ""
    """For people: what the attempt waits for, and how far that is; while it trains, what it saves or validates, that
    its ranks stand still, or why it has fewer workers than granted."""
    failure: UserFailure | None = None
    conditions: tuple[Condition, ...] = ()
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
    status: JobStatus
    queue: QueuePlace | None = None
    """null: the job is not in the queue, or the scheduler has not considered it yet."""


class JobSummary(Frozen):
    """An entry of the list of jobs."""

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
    note: str = ""
    """What the job does beside its steps, or waits for; for people."""
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


class DrainView(Drain):
    """A drain of a node, as the API shows it."""


class DrainRequest(Frozen):
    """The request to drain a node."""

    reason: str = Field("drain requested", min_length=1, max_length=500)
    """For people; shown with the node and in the histories of the jobs that leave it."""
    deadline_s: float | None = Field(None, ge=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds until the node goes away; null: it stays, but nothing may run on it."""


class NodeView(Node):
    """A node of the cluster, as the API shows it."""

    drain: DrainView | None = None
    num_workers: int = 0
    """Workers of all jobs on it now. A drained node is drained once there is none, and draining before."""
    cpus_of_others: float = 0.0
    """Reserved by others than Shoal's jobs on a shared Ray cluster; the scheduler leaves them out."""
    gpus_of_others: float = 0.0

    @classmethod
    def of(cls, node: Node, **changes: float) -> NodeView:
        return cls.model_validate({**node.model_dump(), **changes})


class ClusterSummary(Frozen):
    """One of the Ray clusters that have joined."""

    name: str
    address: str = ""
    connected: bool = False
    """Its gateway reports, and Ray answers it."""
    why_away: str = ""
    """Why it is not connected, for people; empty: it is."""
    silent_s: float | None = None
    """Seconds since its gateway's newest report; null: none has come."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Added to those of its nodes; a node's own take precedence."""
    cordon: Cordon | None = None
    """No worker is added on its nodes; those that are there stay."""
    num_nodes: int = 0
    """Nodes that are alive. This and the numbers below are those of the newest snapshot."""
    cpus_total: float = 0.0
    cpus_free: float = 0.0
    gpus_total: float = 0.0
    gpus_free: float = 0.0
    num_jobs: int = 0
    """Jobs with an attempt there."""


class ClusterView(Frozen):
    """The clusters as the scheduler sees them."""

    connected: bool
    """Whether at least one of them is connected."""
    address: str
    """Address of the first cluster."""
    clusters: tuple[ClusterSummary, ...] = ()
    """By name; the service's own first."""
    nodes: tuple[NodeView, ...]
    cpus_total: float
    cpus_free: float
    gpus_total: float
    gpus_free: float
    owner: str
    """Name of the control plane that holds the lease."""
    epoch: int


class ParityView(Parity):
    """How far the losses of two jobs differ, step by step; usually one had incidents and the other had none."""

    job_id: str
    against_id: str


class Page(Frozen, Generic[T]):
    items: tuple[T, ...]
    next_cursor: str | None = None
    """Opaque: pass it as `cursor` for the next page; null: this is the last."""
