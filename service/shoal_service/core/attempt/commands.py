"""What the machine decides: a closed union of commands. The executor performs them; results come back as events."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.attempt.state.incident import Incident
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.base import JobEvent
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.worker_reports import SavedPart


@dataclass(frozen=True, slots=True)
class FindCheckpoint:
    """Look for the newest committed checkpoint that is not in `excluding`; answer CheckpointFound."""

    excluding: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StartWorker:
    index: int
    worker_id: str
    avoid_nodes: tuple[str, ...] = ()
    """Node ids on which it must not be placed."""
    only_on: str = ""
    """Node id on which it must be placed; empty: any other."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    index: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Interrupt:
    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class RequestYield:
    index: int
    generation: int
    durable: bool = True
    """With a durable checkpoint part of that step; False: the snapshot in memory is enough."""


@dataclass(frozen=True, slots=True)
class RequestSnapshotParts:
    """Answer SnapshotPartsReported, or the worker's loss."""

    index: int


@dataclass(frozen=True, slots=True)
class SuspectNode:
    """A worker on this node was at fault: the control plane puts the node on probation."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the commit marker; answer CheckpointCommitted or CommitFailed."""

    name: str
    parts: tuple[SavedPart, ...]


@dataclass(frozen=True, slots=True)
class ForgetDamaged:
    """A checkpoint failed verification: show it as damaged."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Emit:
    """An entry of the job's history."""

    event: JobEvent


@dataclass(frozen=True, slots=True)
class ShowIncident:
    incident: Incident
    closed_at: float | None = None
    """When the first step after it was done; None: it is still open."""


@dataclass(frozen=True, slots=True)
class End:
    end: AttemptEnd


Command = (
    FindCheckpoint
    | StartWorker
    | KillWorker
    | Run
    | Interrupt
    | RequestYield
    | RequestSnapshotParts
    | SuspectNode
    | Commit
    | ForgetDamaged
    | Emit
    | ShowIncident
    | End
)
