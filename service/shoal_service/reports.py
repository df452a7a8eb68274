"""The reports of a supervisor: it collects them in its outbox, the service stores them. Pure data."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events import JobEvent
from shoal_service.core.system_metrics import SystemSample
from shoal_service.views import CheckpointView, IncidentView, JobStatus, WorkerView
from shoal_workers.contract import Frozen, LogStream, Profiled, Stacks


class PendingEvent(Frozen):
    """An event that the store has not numbered yet, in the form in which it is sent and stored.

    `type` and `data` may be any, so that a control plane passes on the events of a newer supervisor.
    """

    at: float
    type: str
    data: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, event: JobEvent, at: float) -> PendingEvent:
        return cls(at=at, type=event.type, data=event.data())


class PendingLog(Frozen):
    """A line that a worker has printed, which the store has not numbered yet."""

    at: float
    rank: int | None
    worker_id: str
    stream: LogStream
    text: str


class SuspectedNode(Frozen):
    """A node that may be the cause of a failure, because a worker on it was at fault."""

    at: float
    node_id: str
    reason: str


class StacksAnswer(Frozen):
    """The answer to a directive that requests the stacks of the workers."""

    number: int
    """Number of the request."""
    stacks: Stacks | None
    """None if the attempt has no workers now, because it begins or is over."""


class SupervisorReports(Frozen):
    """Everything that a supervisor has to report after a sequence number, to be stored in one transaction."""

    attempt: int
    version: int = 1
    """Version of the wire: that of the supervisor's release; see WIRE_VERSION."""
    seq: int
    """Number of the last item; it is stored with the items, so that each is stored exactly once."""
    events: tuple[PendingEvent, ...] = ()
    incidents: tuple[IncidentView, ...] = ()
    """New and changed incidents, complete; stored by id."""
    checkpoints: tuple[CheckpointView, ...] = ()
    """New and changed checkpoints, complete; stored by (step, attempt, generation)."""
    series: tuple[SeriesPoint, ...] = ()
    """Stored by step: a step that is computed again after a rollback replaces its former point."""
    logs: tuple[PendingLog, ...] = ()
    system: tuple[SystemSample, ...] = ()
    """System metrics by rank since the report before."""
    suspects: tuple[SuspectedNode, ...] = ()
    """Nodes that go on probation."""
    profiles: tuple[Profiled, ...] = ()
    """Ended requests for profiles; stored by number, the first of each."""
    stacks: StacksAnswer | None = None
    """The newest answer."""
    status: JobStatus
    """The newest status."""
    workers: tuple[WorkerView, ...] = ()
    end: AttemptEnd | None = None
