"""Incidents: opened, what is done to save the newest steps, closed."""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity
from shoal_service.core.node_loss import NodeLossBound
from shoal_service.core.quantities import count_text, duration_text
from shoal_workers.contract.job import IncidentCause, StateSource
from shoal_workers.contract.suspects import Suspect


class IncidentOpened(JobEvent):
    """A worker of the group was lost, or the group broke."""

    type: ClassVar[str] = "incident.opened"
    severity: ClassVar[Severity] = Severity.ERROR

    id: int
    cause: IncidentCause
    witness: str
    ranks: tuple[int, ...]
    message: str
    generation: int
    workers: int
    step: int
    node_loss: NodeLossBound | None = None
    """A node was lost: the bound that was in force."""

    def words(self) -> str:
        ranks = ", ".join(str(rank) for rank in self.ranks)
        where = f" of rank {ranks}" if ranks else ""
        message = f": {self.message}" if self.message else ""
        bound = f"; {self.node_loss.words()}" if self.node_loss is not None else ""
        return f"incident {self.cause}{where}{message}{bound}"


class IncidentSuspected(JobEvent):
    """The evidence names whom an open incident suspects."""

    type: ClassVar[str] = "incident.suspected"
    severity: ClassVar[Severity] = Severity.WARNING

    id: int
    suspect: Suspect

    def words(self) -> str:
        return f"incident {self.id}, suspected: {self.suspect.words()}"


class SnapshotsRecovering(JobEvent):
    """The newest snapshots are in the memory of nodes that have no worker any more: workers are started there to read
    them before the group re-forms."""

    type: ClassVar[str] = "snapshot.recovering"
    severity: ClassVar[Severity] = Severity.WARNING

    nodes: tuple[str, ...]
    steps: int
    """Steps that would be lost otherwise."""
    until: float
    """Seconds since the epoch; the group re-forms without those snapshots then."""

    def words(self) -> str:
        steps, nodes = count_text(self.steps, "step"), count_text(len(self.nodes), "node")
        return f"workers are started on {nodes} to read the snapshots in memory there, which may save {steps}"


class SnapshotsLacking(JobEvent):
    """A rank has no memory for snapshots. Until the next generation no snapshot is whole without its part."""

    type: ClassVar[str] = "snapshot.lacking"
    severity: ClassVar[Severity] = Severity.ERROR

    generation: int
    step: int
    rank: int
    only_copies: bool
    """Only its copies to other nodes are lacking: a worker's death still costs at most one step."""
    message: str

    def words(self) -> str:
        what = "sends no more copies to other nodes" if self.only_copies else "keeps no more snapshots in memory"
        return f"rank {self.rank} {what}: {self.message}"


class IncidentClosed(JobEvent):
    """The first step after the incident is complete."""

    type: ClassVar[str] = "incident.closed"
    severity: ClassVar[Severity] = Severity.SUCCESS

    id: int
    cause: IncidentCause
    action: str
    detect_s: float | None
    recovery_s: float | None
    steps_lost: int | None
    from_workers: int
    to_workers: int | None
    state_source: StateSource | None
    bytes_moved: int | None

    def words(self) -> str:
        parts = [
            None if self.to_workers is None else f"{self.from_workers} -> {count_text(self.to_workers, 'worker')}",
            None if self.detect_s is None else f"detected in {duration_text(self.detect_s)}",
            None if self.recovery_s is None else f"recovered in {duration_text(self.recovery_s)}",
            None if self.steps_lost is None else f"{count_text(self.steps_lost, 'step')} lost",
            None if self.state_source is None else f"state from {self.state_source}",
        ]
        return f"incident {self.cause} closed: {', '.join(part for part in parts if part)}"
