"""The messages between a supervisor and its shards. Every one carries its generation; stale ones are dropped.

supervisor --- run(Assignment) ------------------> shard     one call in flight per shard; answers WorkerExit
supervisor --- interrupt(generation) ------------> shard     control thread: fence, wake the training thread
supervisor --- request_yield(generation) --------> shard     control thread: stop at the next step boundary
supervisor --- poll(after) ----------------------> shard     control thread: long poll, answers WorkerPoll
supervisor --- holdings() -----------------------> shard     control thread: what lies in its node's memory
"""

from __future__ import annotations

from enum import StrEnum

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.log_settings import LogSettings
from shoal_workers.contract.snapshots import SnapshotPart, SnapshotServer, SnapshotSource
from shoal_workers.contract.worker_reports import WorkerReport


class WorkerConfig(Frozen):
    """What a shard process is born with, besides the spec."""

    job_id: str
    attempt: int
    worker_id: str
    checkpoint_root: str
    """URL of the job's checkpoint directory."""
    snapshot_key: str
    """Shared secret of the attempt: who serves or asks for snapshots proves that it knows it."""
    expected_bytes: int = 0
    """Memory that a rank without a GPU is predicted to take, over what the process has before; 0: unknown."""
    logs: LogSettings = LogSettings()


class WorkerInfo(Frozen):
    """What a shard says of itself once its process is warm: imports done, task class loaded, store listening."""

    worker_id: str
    node_id: str
    node_ip: str
    pid: int
    store_port: int
    """Port of this process's own TCPStore. The group of a generation meets at its rank 0's."""
    device: str
    """"cpu", or "cuda"."""
    snapshot_port: int = 0
    """Where it serves the snapshots of its node; 0: it keeps none."""


class Assignment(Frozen):
    """One shard's part in one generation."""

    job_id: str
    attempt: int
    generation: int
    rank: int
    layout: Layout
    store_host: str
    store_port: int
    restore_from: str | None
    """URL of the committed checkpoint directory to load; None: start from the seed at step 0."""
    restore_snapshot: SnapshotSource | None = None
    """A whole snapshot in memory; goes before `restore_from`."""
    buddy: SnapshotServer | None = None
    """Who keeps a copy of this rank's snapshots, on another node; None: there is no other node."""
    is_recovery: bool = False
    """The group before was lost: what was due after the step to start from (validation, checkpoint) may be missing."""
    skip_steps: tuple[int, ...] = ()
    """Numbers of steps that are not trained; their samples are used up."""
    store_timeout_s: float = 60.0
    """Until all members have met."""
    collective_timeout_s: float = 600.0
    """A collective that makes no progress for so long fails."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size


class Phase(StrEnum):
    """What a shard's training thread is doing."""

    IDLE = "idle"
    PREPARING = "preparing"
    FORMING = "forming"
    BUILDING = "building"
    RESTORING = "restoring"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    SNAPSHOT = "snapshot"
    SAVING = "saving"
    VALIDATING = "validating"


class LogStream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"
    SHOAL = "shoal"
    """Written by the engine itself."""


class LogLine(Frozen):
    at: float
    stream: LogStream
    text: str


class Progress(Frozen):
    """Where the training thread stands; written by it, read by the control thread."""

    generation: int
    phase: Phase
    step: int
    at: float
    note: str = ""
    """For people: what it prepares and how far it is."""
    counter: int = 0
    """Grows whenever the training thread gets anywhere. A beat that stands still is a hang, or a long computation."""
    stalled_s: float = 0.0
    """For how long it has stood still when this was told, by the process's own clock: a poll may be answered late."""


class WorkerPoll(Frozen):
    """Answer of a long poll: everything after the sequence number that was asked for."""

    worker_id: str
    seq: int
    """Number of the last item told; ask for `after=seq` next."""
    reports: tuple[WorkerReport, ...]
    logs: tuple[LogLine, ...]
    progress: Progress


class ExitKind(StrEnum):
    """Why `run` returned."""

    FINISHED = "finished"
    """The last step is done and the final checkpoint part is durable."""
    YIELDED = "yielded"
    """Stopped at a step boundary on request; the snapshot of that step is in memory, and its checkpoint part is
    durable if that was asked for."""
    INTERRUPTED = "interrupted"
    """Fenced by the supervisor in mid-step; nothing was mutated since the last completed step."""
    COLLECTIVE_FAILED = "collective_failed"
    """A collective broke under this rank: a report about *someone else*."""
    FORM_FAILED = "form_failed"
    """The group did not come together."""
    SNAPSHOT_LOST = "snapshot_lost"
    """A part of the snapshot to restore from could not be read from memory; the supervisor looks for another source."""
    DAMAGED_CHECKPOINT = "damaged_checkpoint"
    """The checkpoint to restore from failed verification; the supervisor falls back to the previous one."""
    STORAGE_FAILED = "storage_failed"
    """The storage could not be read or written where training cannot go on without it."""
    NON_FINITE = "non_finite"
    """Loss or gradient norm is not finite."""
    USER_ERROR = "user_error"
    """The task's own code raised."""
    STALE = "stale"
    """The assignment's generation was already fenced when it arrived."""


class ErrorReport(Frozen):
    """An exception, flattened for the wire."""

    type: str
    message: str
    traceback: str
    phase: Phase


class WorkerExit(Frozen):
    """The answer of `run`."""

    generation: int
    rank: int
    kind: ExitKind
    step: int
    """Optimizer steps that this rank has completed."""
    error: ErrorReport | None = None
    snapshot_parts: tuple[SnapshotPart, ...] = ()
    """What lies in its node's memory now, its own and others'."""
    is_durable: bool = False
    """FINISHED and YIELDED: the checkpoint part of `step` is durable."""
    at: float = 0.0
    """Wall-clock time at which it left, seconds since the epoch."""
