"""What the service shows of itself: the resources of the REST API, also used by the Python client. Pure data."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.job import IncidentCause, JobState
from shoal_workers.contract.spec import JobSpec, ParallelismSpec

T = TypeVar("T")


class Condition(Frozen):
    """One aspect of a job that is true or false, with the reason, in the manner of Kubernetes conditions."""

    type: str
    """Scheduled, WorkersReady, CheckpointHealthy."""
    status: bool
    reason: str
    message: str
    since: float
    """Wall-clock time of the last change of `status`."""


class WorkerView(Frozen):
    """One process of a job."""

    worker_id: str
    rank: int | None
    """None: a standby, or a newcomer that is not yet in the group."""
    state: str
    """starting, warm, training, stopping."""
    node_id: str
    node_ip: str
    pid: int
    generation: int
    phase: str
    step: int


class UserFailure(Frozen):
    """An exception of the user's code, grouped over the ranks that raised the same."""

    type: str
    message: str
    traceback: str
    phase: str
    ranks: tuple[int, ...]
    step: int


class JobStatus(Frozen):
    """The system's side of a job. Only supervisors and the scheduler write it."""

    state: JobState = JobState.QUEUED
    reason: str = ""
    """Machine-readable: an EndReason for ended jobs, else what the state waits for."""
    message: str = ""
    """For people."""
    deadline: float | None = None
    """When a waiting state gives up, wall-clock time."""
    observed_generation: int = 0
    """The spec version that the system has acted on."""
    attempt: int = 0
    generation: int = 0
    """The generation of the attempt's group; not to be confused with the spec's version."""
    workers: int = 0
    """World size now."""
    desired_workers: int = 0
    """World size that the scheduler has granted."""
    layout: str = ""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    tokens_per_s: float | None = None
    tokens: int = 0
    steps_lost: int = 0
    incidents: int = 0
    checkpoint_step: int | None = None
    """Newest committed checkpoint."""
    num_parameters: int | None = None
    eta_s: float | None = None
    note: str = ""
    """What a starting job is busy with, for people."""
    failure: UserFailure | None = None
    conditions: tuple[Condition, ...] = ()
    goodput: Goodput | None = None
    snapshot_every_steps: float | None = None
    """A snapshot in memory after every so many steps; None: not known yet, or switched off."""
    snapshot_share: float | None = None
    """Of the step time."""


class JobView(Frozen):
    """A job: the user's spec and the system's status, kept apart."""

    id: str
    name: str
    spec: JobSpec
    spec_version: int
    """Counts accepted changes of the spec; status.observed_generation follows it."""
    etag: str
    created_at: float
    updated_at: float
    started_at: float | None = None
    ended_at: float | None = None
    status: JobStatus


class JobSummary(Frozen):
    """A line of the job list."""

    id: str
    name: str
    state: JobState
    reason: str = ""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    workers: int = 0
    desired_workers: int = 0
    priority: int = 0
    created_at: float
    updated_at: float


class EventView(Frozen):
    """One entry of a job's gap-free history."""

    seq: int
    """1, 2, 3 ... per job."""
    at: float
    type: str
    """Dotted, closed set: job.created, job.state, incident.opened, incident.closed, checkpoint.committed ..."""
    data: dict[str, Any] = Field(default_factory=dict)


class IncidentView(Frozen):
    """Something that went wrong, and what it cost.

    `detect_s` ends with `at`, when the supervisor took notice. It begins when the node saw the process die (20-40 ms
    late, by the clock of Ray's head). Where that is not known (the node died with it, it hangs, its link was cut) it
    begins with the last sign before: the report of a survivor whose collective broke, or a beat of the lost member.
    Then it is an upper bound.
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
    """The generation that was hit."""
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
    """From detection to the end of the first completed step of the next generation."""
    state_source: str | None = None
    """"replica", "memory", "checkpoint" or "initial"."""
    bytes_moved: int | None = None
    """Read to restore, by all ranks together."""
    steps_lost: int | None = None
    from_layout: str = ""
    to_layout: str | None = None
    action: str = ""
    """What was done about it; see docs/architecture.md."""
    closed: bool = False
    message: str = ""


class CheckpointView(Frozen):
    step: int
    url: str
    state: str
    """committed, damaged, deleted, failed."""
    bytes: int = 0
    seconds: float = 0.0
    """From the staging of the first rank to the commit."""
    stall_s: float = 0.0
    committed_at: float | None = None
    attempt: int
    generation: int
    world_size: int = 0
    message: str = ""


class SeriesPoint(Frozen):
    """One completed step, or (down-sampled) the mean of several."""

    step: int
    at: float
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    step_s: float
    world_size: int
    generation: int
    val_loss: float | None = None


class LogView(Frozen):
    seq: int
    at: float
    rank: int | None
    worker_id: str
    stream: str
    text: str


class DrainView(Frozen):
    """A node that is being left."""

    reason: str
    requested_at: float
    deadline: float | None = None
    """Wall-clock time at which the node goes away; None: it stays, nothing shall run on it."""
    source: str
    """"api", or "ray" for a drain that the cluster announced."""


class DrainRequest(Frozen):
    """What is asked of a node that shall be left."""

    reason: str = Field("drain requested", min_length=1, max_length=500)
    """For people; shown with the node and in the histories of the jobs that leave it."""
    deadline_s: float | None = Field(None, ge=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds until the node goes away; null: it stays, nothing shall run on it."""


class NodeView(Frozen):
    node_id: str
    ip: str
    alive: bool
    cpus: float
    gpus: float
    memory_gib: float
    drain: DrainView | None = None
    suspected: str = ""
    """Why it is on probation; empty: it is not."""
    suspected_since: float | None = None
    next_test_at: float | None = None
    """When the probation test of it runs next; until one passes, no new process is placed there."""


class ClusterView(Frozen):
    """What the scheduler sees."""

    connected: bool
    address: str
    nodes: tuple[NodeView, ...]
    cpus_total: float
    cpus_free: float
    gpus_total: float
    gpus_free: float
    owner: str
    """The control plane that holds the lease."""
    epoch: int


class Goodput(Frozen):
    """Every worker-second of a job, booked to exactly one cause."""

    seconds: dict[str, float] = Field(default_factory=dict)
    """By category: queued, starting, productive, recomputed, checkpoint_stall, recovering, resizing, degraded, idle."""
    recovering: dict[str, float] = Field(default_factory=dict)
    """The category `recovering`, by incident cause."""
    total: float = 0.0
    """Wall-clock seconds times the workers asked for; the sum of `seconds`."""
    ratio: float | None = None
    """productive / total; None before anything was booked."""
    at: float | None = None
    """Booked up to this wall-clock time."""
    max_step: int = 0
    """Largest step that was ever completed: one up to it that is done again is `recomputed`."""


class SpecDifference(Frozen):
    """A key that decides about the losses, and is not the same in two specs."""

    path: str
    """Dotted, for example optimizer.lr."""
    value: Any
    against: Any


class ParityPoint(Frozen):
    """One step of two jobs, next to each other."""

    step: int
    loss: float
    """NaN and infinity are null."""
    against: float
    abs_diff: float
    rel_diff: float


class ParityView(Frozen):
    """How far the losses of two jobs differ, step by step: of one with incidents against an undisturbed one."""

    job_id: str
    against_id: str
    tolerance: float
    """Largest relative difference that is still parity."""
    within_tolerance: bool
    """Steps were compared, and none differs by more."""
    bit_identical: bool
    """Steps were compared, and all losses are the same doubles."""
    steps_compared: int
    steps_only_in_job: int
    steps_only_in_against: int
    max_abs_diff: float | None = None
    max_abs_diff_step: int | None = None
    max_rel_diff: float | None = None
    """|a - b| / max(|a|, |b|); infinite (null) where only one of them is finite."""
    max_rel_diff_step: int | None = None
    first_step_different: int | None = None
    first_step_over_tolerance: int | None = None
    steps_over_tolerance: int = 0
    differs_in: tuple[SpecDifference, ...] = ()
    """Why the losses may well differ: data, model, seed and so on are not the same. Empty: the specs match."""
    points: tuple[ParityPoint, ...] = ()
    """Of long series: of each of equal shares of the steps, the one with the largest relative difference."""


class Page(Frozen, Generic[T]):
    items: tuple[T, ...]
    next_cursor: str | None = None
    """Opaque; pass it as `cursor` for the next page; None: this was the last."""


class JobPatch(Frozen):
    """What may change of a job that was submitted. Absent keys stay as they are."""

    elasticity: ElasticityPatch | None = None
    parallelism: Literal["auto"] | ParallelismSpec | None = None
    """Whole: degrees that are left out are 1. A running group takes its new layout at the next step boundary."""
    priority: int | None = Field(None, ge=-1000, le=1000)


class ElasticityPatch(Frozen):
    min_workers: int | None = Field(None, ge=1, le=100_000)
    max_workers: int | None = Field(None, ge=1, le=100_000)
    standby: int | None = Field(None, ge=0, le=1_000)
    wait_s: float | None = Field(None, gt=0, le=30 * 86400, allow_inf_nan=False)


JobPatch.model_rebuild()
