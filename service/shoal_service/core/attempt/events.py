"""What can happen to an attempt: the closed union that `machine.step` consumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.desired import Desired
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ErrorReport, Progress, WorkerExit, WorkerInfo
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.spec import ElasticitySpec, ParallelismSpec, TrainingSettings
from shoal_workers.contract.worker_reports import WorkerReport


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    """Answer to FindCheckpoint: the newest usable one, or None."""

    name: str | None
    damaged: tuple[tuple[str, str], ...] = ()
    """Newer ones whose commit marker is damaged: name and message."""


@dataclass(frozen=True, slots=True)
class StorageUnusable:
    """The checkpoint URL cannot be read or written at all: the configuration must be changed."""

    message: str


@dataclass(frozen=True, slots=True)
class StorageAway:
    """The search for a checkpoint failed, and may succeed later."""

    message: str


@dataclass(frozen=True, slots=True)
class WorkerWarm:
    index: int
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerFailedToStart:
    """The worker came up, but the user's code or data cannot be loaded in it."""

    index: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker is gone."""

    index: int
    cause: IncidentCause
    witness: str
    message: str


@dataclass(frozen=True, slots=True)
class DeathDated:
    """When a worker died, from the process that watched it. Follows WorkerLost, which does not wait for it."""

    worker_id: str
    at: float
    """Wall-clock time, by the clock of Ray's head."""


@dataclass(frozen=True, slots=True)
class DeathExplained:
    """How a worker's process ended. Follows WorkerLost, which does not wait for it."""

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
    """What the control plane wants of the attempt. Whole, not a change."""

    granted: int
    desired: Desired
    elasticity: ElasticitySpec
    parallelism: Literal["auto"] | ParallelismSpec
    """The group takes another layout at the next step boundary."""
    settings: TrainingSettings | None
    """The group takes other settings at the next step boundary; None: they stay."""
    code: str | None
    """SHA-256 of its archive, empty if there is none; None: it stays. Workers with other code start beside the present
    ones, and take over at a step boundary."""
    server_stops: bool
    """The server ends the cluster once the attempt is saved; False after True: another server has taken over."""
    is_preempted: bool
    """Another job gets the workers once the attempt is saved."""
    pinned: tuple[str, ...]
    """Names of the checkpoints that retention does not delete."""


@dataclass(frozen=True, slots=True)
class ModelsCompared:
    """Answer to CompareModels."""

    index: int
    difference: str
    """The difference in words; empty: there is none."""


@dataclass(frozen=True, slots=True)
class ClockJumped:
    """The wall clock was set, or the machine was suspended: no time passed for the attempt."""

    by_s: float


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """A worker has answered a poll. Sent even if the progress has not changed, because the answer itself counts."""

    index: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class InterruptAcknowledged:
    """The control thread has fenced that generation and is waking the training thread."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class SnapshotPartsReported:
    """Answer to RequestSnapshotParts: what lies in the worker's node's memory."""

    index: int
    snapshot_parts: tuple[SnapshotPart, ...]


@dataclass(frozen=True, slots=True)
class WorkerUnreachable:
    """Calls to the worker fail, and it is not known to be dead: its node or the network to it may have failed."""

    index: int


@dataclass(frozen=True, slots=True)
class Reopened:
    """The supervisor was restarted from the journal, which may be older than what its predecessor did last."""


@dataclass(frozen=True, slots=True)
class NodesAvoided:
    """Every node that must not be used: being drained, or on probation. Whole, not a change."""

    nodes: tuple[AvoidedNode, ...]


@dataclass(frozen=True, slots=True)
class NodesSilent:
    """The nodes whose kernels answer no connect, with the reason. Whole, not a change; repeated while there is one."""

    nodes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; deadlines are checked."""


Event = (
    CheckpointFound
    | StorageUnusable
    | StorageAway
    | WorkerWarm
    | WorkerFailedToStart
    | WorkerLost
    | DeathDated
    | DeathExplained
    | RunReturned
    | ReportArrived
    | CheckpointCommitted
    | CommitFailed
    | Directed
    | ModelsCompared
    | ClockJumped
    | ProgressReported
    | InterruptAcknowledged
    | SnapshotPartsReported
    | WorkerUnreachable
    | Reopened
    | NodesAvoided
    | NodesSilent
    | Tick
)
