"""What can happen to an attempt: the closed union that `machine.step` consumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal_service.core.attempt.state import AvoidedNode
from shoal_service.core.desired import Desired
from shoal_workers.contract import (
    ElasticitySpec,
    ErrorReport,
    IncidentCause,
    ParallelismSpec,
    Progress,
    SnapshotPart,
    TrainingSettings,
    WorkerExit,
    WorkerInfo,
    WorkerReport,
)


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    """The answer to FindCheckpoint: the newest usable checkpoint, or None."""

    name: str | None
    damaged: tuple[tuple[str, str], ...] = ()
    """Newer checkpoints whose commit marker is damaged: (name, message) of each."""


@dataclass(frozen=True, slots=True)
class StorageUnusable:
    """The checkpoint URL cannot be read or written at all: the configuration must be changed."""

    message: str


@dataclass(frozen=True, slots=True)
class StorageAway:
    """The search for a checkpoint failed, and may succeed later."""

    message: str
    is_missing: bool = False
    """The storage has answered, without what the job has committed (`checkpoints.is_missing`)."""


@dataclass(frozen=True, slots=True)
class WorkerWarm:
    index: int
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerFailedToStart:
    """The worker's process has started, but the user's code or data cannot be loaded in it."""

    index: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone: its process has ended, or is treated as ended."""

    index: int
    cause: IncidentCause
    witness: str
    message: str


@dataclass(frozen=True, slots=True)
class DeathDated:
    """When a worker died, as observed by the process that watched it. It follows WorkerLost, which does not wait for
    it."""

    worker_id: str
    at: float
    """Wall-clock time, by the clock of Ray's head."""


@dataclass(frozen=True, slots=True)
class DeathExplained:
    """How a worker's process ended, in words. It follows WorkerLost, which does not wait for it."""

    worker_id: str
    message: str


@dataclass(frozen=True, slots=True)
class RunReturned:
    index: int
    exit: WorkerExit


@dataclass(frozen=True, slots=True)
class ReportArrived:
    index: int
    item: WorkerReport


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    name: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    name: str
    generation: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Directed:
    """What the control plane wants of the attempt: every value, not only those that have changed."""

    granted: int
    desired: Desired
    elasticity: ElasticitySpec
    parallelism: Literal["auto"] | ParallelismSpec
    """Value of the spec; if it has changed, the group takes another layout at the next step boundary."""
    settings: TrainingSettings | None
    """Training settings that the group takes at the next step boundary; None if they stay as they are."""
    code: str | None
    """SHA-256 of the code's archive; empty if the job has no archive; None if the code stays as it is. Workers with
    other code start while the present workers train, and take over at a step boundary."""
    server_stops: bool
    """The server ends the cluster once the attempt is saved; False after True: another server has taken over."""
    is_preempted: bool
    """Another job gets the workers once the attempt is saved, or the job moves."""
    pinned: tuple[str, ...]
    """Names of the checkpoints that retention does not delete."""
    moves_to: str = ""
    """The cluster in which the job goes on; empty if it does not move."""


@dataclass(frozen=True, slots=True)
class ModelsCompared:
    """The answer to CompareModels."""

    index: int
    difference: str
    """The difference in words; empty if there is none."""


@dataclass(frozen=True, slots=True)
class ClockJumped:
    """The wall clock was set, or the machine was suspended. No time has passed for the attempt."""

    by_s: float


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """A worker has answered a poll. The event is sent even if the progress has not changed, because the answer itself
    counts."""

    index: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class InterruptAcknowledged:
    """The worker's control thread has fenced that generation and is waking the training thread."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class SnapshotPartsReported:
    """The answer to RequestSnapshotParts: the snapshot parts in the memory of the worker's node."""

    index: int
    snapshot_parts: tuple[SnapshotPart, ...]


@dataclass(frozen=True, slots=True)
class WorkerUnreachable:
    """Calls to the worker fail, but it is not known to be dead: its node or the network to it may have failed."""

    index: int


@dataclass(frozen=True, slots=True)
class Reopened:
    """The supervisor was restarted from the journal, which may be older than what its predecessor did last."""


@dataclass(frozen=True, slots=True)
class NodesAvoided:
    """All nodes that must not be used, because they are drained or on probation. It replaces the list before."""

    nodes: tuple[AvoidedNode, ...]


@dataclass(frozen=True, slots=True)
class NodesSilent:
    """All nodes whose kernels answer no connect, with the reason of each. It replaces the list before, and is repeated
    while there is such a node."""

    nodes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; deadlines are checked."""


WorkerEvent = (
    WorkerWarm
    | WorkerFailedToStart
    | WorkerLost
    | WorkerUnreachable
    | RunReturned
    | InterruptAcknowledged
    | ModelsCompared
)
"""Events that matter only while the worker is in the pool."""
Event = (
    WorkerEvent
    | CheckpointFound
    | StorageUnusable
    | StorageAway
    | DeathDated
    | DeathExplained
    | ReportArrived
    | CheckpointCommitted
    | CommitFailed
    | Directed
    | ClockJumped
    | ProgressReported
    | SnapshotPartsReported
    | Reopened
    | NodesAvoided
    | NodesSilent
    | Tick
)
