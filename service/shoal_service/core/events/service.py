"""Shoal itself and the nodes: supervisors that restart, nodes on probation, receivers of events."""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity
from shoal_service.core.quantities import count_text, duration_text


class SupervisorRestarted(JobEvent):
    """The supervisor died, was started again, and reattached to its workers."""

    type: ClassVar[str] = "supervisor.restarted"
    severity: ClassVar[Severity] = Severity.WARNING

    found: int
    of: int

    def words(self) -> str:
        return f"supervisor restarted: reattached to {self.found} of {count_text(self.of, 'worker')}"


class SupervisorMoved(JobEvent):
    """The host of the supervisor answers nothing: another supervisor was started on another node, and continues."""

    type: ClassVar[str] = "supervisor.moved"
    severity: ClassVar[Severity] = Severity.WARNING

    node_id: str
    """Node of the supervisor that was given up."""

    def words(self) -> str:
        return f"supervisor moved: its host, node {self.node_id[:12]}, does not answer"


class SupervisorStartFailed(JobEvent):
    """The supervisor could not be started, or died before it recorded its start."""

    type: ClassVar[str] = "supervisor.start_failed"
    severity: ClassVar[Severity] = Severity.ERROR

    number: int
    """Failed starts in a row, this one included."""
    after_s: float | None
    """Seconds until the next start; null: the attempt ends."""
    message: str

    def words(self) -> str:
        what = "the attempt ends" if self.after_s is None else f"next start in {duration_text(self.after_s)}"
        return f"supervisor not started, {what}: {self.message}"


class DriverFailed(JobEvent):
    """The control plane met an unexpected error while it drove the attempt; the workers are not touched by it."""

    type: ClassVar[str] = "attempt.driver_failed"
    severity: ClassVar[Severity] = Severity.ERROR

    number: int
    """Errors since the supervisor's last report, this one included."""
    after_s: float | None
    """Seconds until the next try; null: the attempt ends."""
    message: str

    def words(self) -> str:
        what = "the attempt ends" if self.after_s is None else f"next try in {duration_text(self.after_s)}"
        return f"the control plane could not drive the attempt, {what}: {self.message}"


class SupervisorRekeyed(JobEvent):
    """The attempt's supervisor did not report with the token that the control plane has for it: the database was
    restored, or the service has another address. Another supervisor was started with a new token, and continues."""

    type: ClassVar[str] = "supervisor.rekeyed"
    severity: ClassVar[Severity] = Severity.WARNING

    message: str
    """Why."""

    def words(self) -> str:
        return f"supervisor restarted with a new token: {self.message}"


class JournalDamaged(JobEvent):
    """A restarted supervisor could not read a part of its journal, and continues from an older state: the group forms
    again if it has done so since, and events that were not stored yet are lost."""

    type: ClassVar[str] = "supervisor.journal_damaged"
    severity: ClassVar[Severity] = Severity.WARNING

    lost: int
    """Changes of the state that cannot be read."""

    def words(self) -> str:
        return f"the supervisor's journal is damaged: {count_text(self.lost, 'change')} lost, it continues from before"


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


class NodeCordoned(JobEvent):
    """A node with workers of this job is cordoned: they stay, and no further worker is placed there."""

    type: ClassVar[str] = "node.cordoned"
    severity: ClassVar[Severity] = Severity.INFO

    node_id: str
    reason: str

    def words(self) -> str:
        return f"node {self.node_id[:12]} is cordoned: {self.reason}; its workers stay, and none is added"


class WebhookGaveUp(JobEvent):
    """A receiver has not accepted events of this job for so long that they are not tried any more. No webhook is sent
    this event."""

    type: ClassVar[str] = "webhook.gave_up"
    severity: ClassVar[Severity] = Severity.ERROR

    hook: str
    """`service/NAME`: of the settings; `job/N`: number N of the spec, from 0."""
    receiver: str
    """The receiver's address, without the path of its URL."""
    num_events: int
    first_seq: int
    """Number of the first event that was given up."""
    last_seq: int
    """Number of the last event that was given up."""
    failing_s: float
    """Seconds since the first failed attempt."""
    error: str
    """Error of the last attempt."""

    def words(self) -> str:
        what = count_text(self.num_events, "event")
        return (
            f"webhook {self.hook}: {what} given up after {duration_text(self.failing_s)}: {self.receiver} {self.error}"
        )


class MetricsHookFailed(JobEvent):
    """The metrics hook of the job logs nothing at the moment. The job trains on, and its newest points are kept and
    sent again; the series of the job itself lacks nothing."""

    type: ClassVar[str] = "metrics.hook_failed"
    severity: ClassVar[Severity] = Severity.WARNING

    hook: str
    """`metrics.hook` of the spec."""
    message: str
    num_waiting: int
    """Points that are not logged yet; at the end of an attempt, that will not be."""
    num_dropped: int
    """Points that were dropped, since too many waited."""

    def words(self) -> str:
        lost = f", {count_text(self.num_dropped, 'point')} dropped" if self.num_dropped else ""
        return (
            f"metrics hook {self.hook} logs nothing, {count_text(self.num_waiting, 'point')} waiting{lost}: "
            f"{self.message}; the job's log has what it printed"
        )
