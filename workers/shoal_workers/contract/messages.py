"""The messages between a supervisor and its workers. Each carries its generation; outdated ones are dropped.

Each call carries the supervisor's life (contract.ids). A worker refuses the calls of a supervisor that has a successor.

supervisor --- adopt(generation) ----------------> worker    first call of a restarted supervisor
supervisor --- run(Assignment) ------------------> worker    one call in flight per worker; returns WorkerExit
supervisor --- interrupt(generation) ------------> worker    control thread: fence, wake the training thread
supervisor --- request_yield(generation) --------> worker    control thread: stop at the next step boundary
supervisor --- note_commit(generation, step) ----> worker    control thread: the last checkpoint is committed
supervisor --- poll(after) ----------------------> worker    control thread: long poll, returns WorkerPoll
supervisor --- poll((PollRequest, ...)) ---------> agent     of a node: polls its workers; returns NodePoll
supervisor --- snapshot_parts() -----------------> worker    control thread: the parts in its node's memory
supervisor --- request_profile(generation) ------> worker    control thread: profile some steps; a report follows
supervisor --- forward_metrics(batch) -----------> worker    control thread: points for the metrics hook; returns the
                                                             progress at once
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.exception_causes import ErrorClass, Origin
from shoal_workers.contract.job import RaisedError, UserFailure
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.log_settings import LogSettings
from shoal_workers.contract.plain_text import OfTask, plain_line
from shoal_workers.contract.snapshots import SnapshotPart, SnapshotScope, SnapshotServer, SnapshotSource
from shoal_workers.contract.suspects import Collective, Link, Suspect
from shoal_workers.contract.training_settings import TrainingSettings
from shoal_workers.contract.validation import Standing
from shoal_workers.contract.worker_reports import SavedPart, WorkerReport


class StepPart(StrEnum):
    """What a training thread spends its time on. Each moment belongs to one of them."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    """Waiting in collectives. With NCCL the GPU waits, and not the thread: then it is part of the others."""
    OPTIMIZER = "optimizer"
    SNAPSHOT = "snapshot"
    OTHER = "other"
    """Checkpoints, validation, forming of a group."""


class WorkerUse(Frozen):
    """One measurement. Sizes are of whole filesystems and devices, which other processes may share."""

    at: float
    """Wall-clock time, seconds since the epoch. It stands still if a filesystem does not answer."""
    cpu_cores: float | None = None
    """CPUs that the process kept busy since the measurement before; null: this is the first."""
    resident_bytes: int = 0
    shm_bytes: int = 0
    """Size of /dev/shm, where snapshots are; 0: there is none."""
    shm_free_bytes: int = 0
    disk_bytes: int = 0
    """Size of the filesystem of the checkpoints, or of temporary files if the checkpoints are not on one."""
    disk_free_bytes: int = 0
    gpu_bytes: int = 0
    """Memory of the worker's GPU; 0: it has none."""
    gpu_free_bytes: int = 0
    gpu_busy: float | None = None
    """Share of the time in which the GPU ran a kernel; null: not measured (package nvidia-ml-py)."""
    gpu_celsius: float | None = None
    """Temperature of the GPU, degrees Celsius; null: not measured (package nvidia-ml-py)."""
    gpu_watts: float | None = None
    """Power that the GPU draws; null: not measured (package nvidia-ml-py)."""
    received_bytes_s: float | None = None
    """Bytes a second that the worker's machine receives over its network interfaces, without the loopback; null:
    unknown."""
    sent_bytes_s: float | None = None
    """Bytes a second that the worker's machine sends."""
    read_bytes_s: float | None = None
    """Bytes a second that the worker reads from disks; null: unknown."""
    written_bytes_s: float | None = None
    """Bytes a second that the worker writes to disks."""
    phases: dict[StepPart, float] = Field(default_factory=dict)
    """Shares of the training thread's time, which add up to 1, over the phases that ended since the measurement before.
    Empty: none has ended, or a script trains."""


class WorkerConfig(Frozen):
    """Values that a worker is started with, besides the job's spec."""

    job_id: str
    attempt: int
    worker_id: str
    checkpoint_root: str
    """URL of the job's checkpoint directory."""
    snapshot_key: str
    """Shared secret of the attempt. Server and client of snapshots, and of the rendezvous store, prove to each other
    that they know it."""
    snapshot_scope: SnapshotScope = SnapshotScope.MACHINE
    """Which workers share the snapshots in shared memory."""
    expected_bytes: int = 0
    """Predicted memory of a rank without a GPU, beyond what the idle process uses; 0: unknown."""
    logs: LogSettings = LogSettings()
    rack_label: str = ""
    """Name of the label of a Ray node that says in which rack it is; empty: racks are not known."""


class WorkerInfo(Frozen):
    """A worker's description of itself once it is warm: imports done, task class loaded, store listening."""

    worker_id: str
    node_id: str
    node_ip: str
    pid: int
    store_port: int
    """Port of this worker's own rendezvous store, at node_ip. A generation uses the store of its rank 0."""
    device: str
    """"cpu", or "cuda"."""
    version: int = 1
    """WIRE_VERSION of the release that this worker runs."""
    snapshot_port: int = 0
    """Port on which the worker serves the snapshots of its node; 0: it keeps none."""
    machine_id: str = ""
    """Equal for all workers that share one memory, even if their Ray nodes differ; empty: `node_id` stands for it."""
    rack: str = ""
    """Value of its node's label for racks; empty: the node has no such label."""
    slot: int = -1
    """Number of its GPU on the node; -1: it has none, or the number is not known."""
    memory_bytes: int = 0
    """Memory of the worker's machine, or less if a control group limits it; 0: not known."""


_FORM_RANK_S = 0.05
"""Seconds by which each rank beyond `_FORM_AT_ONCE` extends the deadlines of forming a group."""
_FORM_AT_ONCE = 64
"""Largest world size whose deadlines of forming are not extended."""


class ProofDemand(StrEnum):
    """Whether a group proves its layout before its first step (contract/proofs.py)."""

    NONE = "none"
    """No proof is made: the layout is proven already, or uses the data axes only."""
    IF_POSSIBLE = "if_possible"
    """The layout is used unless the proof refuses it. A layout that cannot be proven is used."""
    REQUIRED = "required"
    """The layout is used only if it is proven."""


class Assignment(Frozen):
    """One worker's role in one generation."""

    job_id: str
    attempt: int
    life: int = 1
    """Life of the supervisor that formed the group."""
    generation: int
    rank: int
    node_rank: int = 0
    """Number of this rank's node among those of the group, by the lowest rank of each: that of rank 0 is 0."""
    local_rank: int = 0
    """Number of this rank among those of its node."""
    layout: Layout
    store_host: str
    store_port: int
    restore_from: str | None
    """URL of the committed checkpoint directory to load; None means start from the seed at step 0."""
    restore_snapshot: SnapshotSource | None = None
    """A whole snapshot in memory; takes precedence over `restore_from`."""
    buddy: SnapshotServer | None = None
    """The worker on another machine that keeps a copy of this rank's snapshots; None if there is no other machine, or
    this rank's shard has a replica on another machine, or a lower rank sends it to a buddy."""
    is_recovery: bool = False
    """The previous group was lost, so the validation or checkpoint due after the starting step may be missing."""
    settings: TrainingSettings | None = None
    """Settings that replace those of the spec with which the worker was started; None if they are the same."""
    standing: Standing | None = None
    """Results of the validations so far; None if none has been judged yet."""
    skip_steps: tuple[int, ...] = ()
    """Numbers of steps that are not trained; their samples are skipped."""
    proof: ProofDemand = ProofDemand.NONE
    store_timeout_s: float = 60.0
    """Time limit of the rendezvous, seconds; `rendezvous_s` extends it for large groups."""
    connect_timeout_s: float = 15.0
    """Time limit of each process group to connect its ranks, seconds; `connect_s` extends it for large groups."""
    collective_timeout_s: float = 600.0
    """A collective fails if it makes no progress for this long, seconds."""
    commit_timeout_s: float = 0.0
    """Seconds that the final validation, after the last step, waits for the supervisor to commit the checkpoint; 0:
    there is no supervisor to wait for."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def rendezvous_s(self) -> float:
        """Time limit of the rendezvous of this group, seconds. Ranks that have not arrived by then count as missing."""
        return self.store_timeout_s + later_to_form_s(self.world_size)

    @property
    def connect_s(self) -> float:
        """Time limit for each process group of this group to connect its ranks, seconds. Then it has failed."""
        return self.connect_timeout_s + later_to_form_s(self.world_size)

    @property
    def shard(self) -> int:
        """Number of the part of a snapshot that this rank holds; its replicas hold the same one."""
        return self.layout.shard_of(self.rank)

    @property
    def num_shards(self) -> int:
        """Number of parts that a snapshot of this generation consists of."""
        return self.layout.num_distinct_shards


def later_to_form_s(world_size: int) -> float:
    """Seconds that are added to every deadline of forming a group of this many ranks. They are needed because one
    rendezvous store answers all ranks, and each rank connects to all others. 48 s with 1,024 ranks."""
    return _FORM_RANK_S * max(0, world_size - _FORM_AT_ONCE)


class Phase(StrEnum):
    """What a worker's training thread is doing."""

    IDLE = "idle"
    PREPARING = "preparing"
    FORMING = "forming"
    """The rank waits for the other ranks to arrive."""
    CONNECTING = "connecting"
    """All ranks have arrived, and connect to each other."""
    BUILDING = "building"
    RESTORING = "restoring"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    SNAPSHOT = "snapshot"
    SAVING = "saving"
    COMMITTING = "committing"
    """All steps are done and saved; the final validation waits for the commit of the checkpoint."""
    VALIDATING = "validating"
    SCRIPT = "script"
    """The worker's script runs; what it does inside is not known."""


class LogStream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"
    SHOAL = "shoal"
    """Lines that the engine itself writes."""


class LogLine(OfTask):
    at: float
    stream: LogStream
    text: Annotated[str, BeforeValidator(plain_line)]


class Progress(OfTask):
    """The position of the training thread; written by it, read by the control thread."""

    generation: int
    phase: Phase
    step: int
    at: float
    note: str = ""
    """What the worker is preparing, and how far it is, in words for people."""
    counter: int = 0
    """Grows whenever the training thread makes progress. If it stops growing, the thread hangs or computes for long."""
    stalled_s: float = 0.0
    """Seconds for which `counter` had not changed when this was made, by the worker's clock: polls may return late."""
    data_s: float = 0.0
    """Seconds that the training thread has spent on making batches in this generation."""


class WorkerPoll(Frozen):
    """Answer of a long poll: everything after the sequence number that the poll requested."""

    worker_id: str
    seq: int
    """Sequence number of the last item in this answer; the next poll requests `after=seq`."""
    reports: tuple[WorkerReport, ...]
    logs: tuple[LogLine, ...]
    progress: Progress
    num_refused: int = 0
    """Number of calls of replaced supervisors that this worker has refused."""
    use: WorkerUse | None = None
    """The newest measurement; null: there is none yet."""


class PollRequest(Frozen):
    """One poll that a supervisor requests. The agent of the worker's node makes it by calling `WorkerActor.poll`."""

    worker_id: str
    after: int
    """The poll asks for everything after this sequence number."""
    acknowledged: int
    """The supervisor has stored everything up to this sequence number."""
    wait_s: float
    """Seconds for which the poll waits if there is nothing new."""


class NodePoll(Frozen):
    """An agent's answer: the polls that its workers have answered. The agent still waits for the others."""

    polls: tuple[WorkerPoll, ...] = ()
    failed: tuple[str, ...] = ()
    """Ids of workers whose poll has failed. The supervisor polls them itself, and so learns why."""


class Refused(Frozen):
    """The answer to any call of a supervisor that has a successor: the worker has done nothing."""

    life: int
    """Life of the newest supervisor that has called this worker."""


class ExitKind(StrEnum):
    """Why `run` returned."""

    FINISHED = "finished"
    """The last step is done and the final checkpoint part is durable."""
    YIELDED = "yielded"
    """The rank stopped at a step boundary on request. The snapshot of that step is in memory; its checkpoint part is
    durable if that was requested."""
    INTERRUPTED = "interrupted"
    """The supervisor fenced the rank during a step; the state is that of the last completed step."""
    COLLECTIVE_FAILED = "collective_failed"
    """A collective failed on this rank. The cause is another rank, or the network."""
    FORM_FAILED = "form_failed"
    """The group did not form."""
    SNAPSHOT_LOST = "snapshot_lost"
    """A part of the snapshot to restore could not be read from memory; the supervisor chooses another source."""
    DAMAGED_CHECKPOINT = "damaged_checkpoint"
    """The checkpoint to restore from failed verification; the supervisor falls back to the previous one."""
    STORAGE_FAILED = "storage_failed"
    """The storage could not be read or written, and training cannot continue without it."""
    NON_FINITE = "non_finite"
    """Loss or gradient norm is not finite."""
    USER_ERROR = "user_error"
    """The task's own code raised."""
    WORKER_FAULT = "worker_fault"
    """The device, memory or the operating system failed, in any code; `error.error_class` tells which."""
    ENGINE_ERROR = "engine_error"
    """The engine's own code raised, which is a defect of Shoal."""
    SCRIPT_DIED = "script_died"
    """The script's process on this rank was killed by a signal that it had not caused, while its worker lives on."""
    STALE = "stale"
    """The assignment's generation was already fenced when it arrived."""


class ErrorReport(RaisedError):
    """An exception of one rank."""

    phase: Phase
    error_class: ErrorClass = ErrorClass.PLAIN
    origin: Origin = Origin.TASK

    def as_failure(self, *, ranks: tuple[int, ...], step: int) -> UserFailure:
        """Return the exception as one that ends an attempt."""
        shared = self.model_dump(include={*RaisedError.model_fields, "phase"})
        return UserFailure(**shared, ranks=ranks, step=step)


class WorkerExit(Frozen):
    """The answer of `run`."""

    generation: int
    rank: int
    kind: ExitKind
    step: int
    """Optimizer steps that this rank has completed."""
    error: ErrorReport | None = None
    snapshot_parts: tuple[SnapshotPart, ...] = ()
    """The parts in the memory of the worker's node at its exit, those of other workers included."""
    is_durable: bool = False
    """True if the checkpoint part of `step` is durable, if `kind` is FINISHED or YIELDED."""
    saved_part: SavedPart | None = None
    """The durable part, repeated here because its own report is lost if the worker dies before the next poll."""
    at: float = 0.0
    """Wall-clock time at which the rank left the group, seconds since the epoch."""
    suspect: Suspect | None = None
    """What this rank suspects, from its own observations; None means nothing."""
    has_output: bool = False
    """True if a script has written a file with a content that no file had when its group began."""

    @property
    def is_planned(self) -> bool:
        """True if the rank has left because all is done, or because it was asked to."""
        return self.kind in (ExitKind.FINISHED, ExitKind.YIELDED)


class StackSource(StrEnum):
    WORKER = "worker"
    """The worker has taken the stack itself, on one of its control threads."""
    PY_SPY = "py-spy"
    """py-spy has read the memory of the process, because it answers no call or native frames were requested."""
    NONE = "none"
    """There is no stack; `error` says why."""


class Frame(OfTask):
    function: str
    file: str
    """Relative to the entry of sys.path that it was imported from. Libraries begin with `site-packages/` or
    `python3`."""
    line: int


class WorkerStack(OfTask):
    """The training thread of one worker."""

    worker_id: str
    pid: int = 0
    frames: tuple[Frame, ...] = ()
    """Frames below Shoal's own call of `run`, innermost first. Empty: the thread is idle, or there is an `error`."""
    module: str = ""
    """Name of the innermost module of the model that is being called, for example `blocks.6.attention`."""
    phase: Phase = Phase.IDLE
    step: int = 0
    """Completed steps."""
    source: StackSource = StackSource.WORKER
    error: str = ""
    collective: Collective | None = None
    """The last collective that the thread has called; null: it trains in no group, or the worker did not answer."""
    links: tuple[Link, ...] = ()
    """Links to the nodes of the other ranks."""


class StackCluster(Frozen):
    """Workers whose training threads have equal stacks."""

    ranks: tuple[int, ...] = ()
    """Ranks of the workers that are in the group."""
    worker_ids: tuple[str, ...]
    words: str
    """Where they are."""
    frames: tuple[Frame, ...]
    """Innermost first."""
    module: str = ""
    phase: Phase
    step: int
    """Completed steps."""
    source: StackSource
    error: str = ""
    """Why there are no frames."""


class Stacks(Frozen):
    """The stacks of a job's workers at one moment."""

    at: float
    """Wall-clock time, seconds since the epoch."""
    generation: int
    reason: str
    """Why they were taken."""
    clusters: tuple[StackCluster, ...]
    """The smallest first: one rank that is elsewhere than the others is the suspect."""
    summary: str
    suspect: Suspect | None = None
    """The group stood still, and this is the most probable reason."""


class MetricPoint(Frozen):
    """The metrics of one step."""

    seq: int
    """Number of the point, counted by the supervisor's process from 1."""
    step: int
    at: float
    """Wall-clock time, seconds since the epoch."""
    values: dict[str, float]


class MetricsBatch(Frozen):
    """Points that are not logged yet, the oldest first. A point that was sent before is ignored."""

    points: tuple[MetricPoint, ...] = ()
    end: str = ""
    """How the attempt ends: "succeeded", "failed", "cancelled", "paused" or "queued". No point follows. Empty: it goes
    on."""


class MetricsProgress(Frozen):
    """The points that the metrics hook has logged, and its error."""

    logged: int = 0
    """The hook has logged all points up to this `seq`."""
    error: str = ""
    """Why the hook logs nothing at present; empty: it works."""
    has_ended: bool = False
    """True if the hook's `end` was called."""


class HookJob(Frozen):
    """Description of the job that a metrics hook receives."""

    id: str
    name: str
    project: str
    user: str
    labels: dict[str, str]
    settings: dict[str, object]
    """The spec, without the secrets' sources and the webhooks."""
