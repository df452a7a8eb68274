"""Shoal itself and the nodes: supervisors that restart, nodes on probation."""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity
from shoal_service.core.quantities import duration_text


class SupervisorRestarted(JobEvent):
    """The supervisor died, was started again, and reattached to its workers."""

    type: ClassVar[str] = "supervisor.restarted"
    severity: ClassVar[Severity] = Severity.WARNING

    found: int
    of: int

    def words(self) -> str:
        return f"supervisor restarted: reattached to {self.found} of {self.of} workers"


class NodeSuspected(JobEvent):
    """A worker of this job was at fault, and the cause may be its node: no job starts workers there until a test of the
    node passes."""

    type: ClassVar[str] = "node.suspected"
    severity: ClassVar[Severity] = Severity.ERROR

    node_id: str
    reason: str

    def words(self) -> str:
        return f"node {self.node_id[:12]} is suspected: {self.reason}"


class NodeCleared(JobEvent):
    """A node that this job suspected has passed its test."""

    type: ClassVar[str] = "node.cleared"
    severity: ClassVar[Severity] = Severity.SUCCESS

    node_id: str
    suspected_s: float
    """Seconds since it was suspected."""
    reason: str
    """Why it was suspected."""

    def words(self) -> str:
        return f"node {self.node_id[:12]} has passed its test after {duration_text(self.suspected_s)}"
