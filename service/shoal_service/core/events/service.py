"""Shoal itself and the nodes: supervisors that restart, nodes on probation, receivers of events."""

from __future__ import annotations

from shoal_service.core.events.base import JobEvent, OfNode, Severity
from shoal_service.core.quantities import count_text


class SupervisorRestarted(
    JobEvent,
    type="supervisor.restarted",
    severity=Severity.WARNING,
    text="supervisor restarted: reattached to {found} of {of:count worker}",
):
    """The supervisor died, was started again, and reattached to its workers."""

    found: int
    of: int


class SupervisorMoved(
    JobEvent,
    type="supervisor.moved",
    severity=Severity.WARNING,
    text="supervisor moved: its host, node {node_id:node}, does not answer",
):
    """The host of the supervisor answers nothing: another supervisor was started on another node, and continues."""

    node_id: str
    """Node of the supervisor that was given up."""


class SupervisorStartFailed(
    JobEvent,
    type="supervisor.start_failed",
    severity=Severity.ERROR,
    text="supervisor not started, [next start in {after_s:duration}|the attempt ends]: {message}",
):
    """The supervisor could not be started, or died before it recorded its start."""

    number: int
    """Failed starts in a row, this one included."""
    after_s: float | None
    """Seconds until the next start; null: the attempt ends."""
    message: str


class DriverFailed(
    JobEvent,
    type="attempt.driver_failed",
    severity=Severity.ERROR,
    text="the control plane could not drive the attempt, [next try in {after_s:duration}|the attempt ends]: {message}",
):
    """The control plane met an unexpected error while it drove the attempt; the workers are not touched by it."""

    number: int
    """Errors since the supervisor's last report, this one included."""
    after_s: float | None
    """Seconds until the next try; null: the attempt ends."""
    message: str


class SupervisorRekeyed(
    JobEvent,
    type="supervisor.rekeyed",
    severity=Severity.WARNING,
    text="supervisor restarted with a new token: {message}",
):
    """The attempt's supervisor did not report with the token that the control plane has for it: the database was
    restored, or the service has another address. Another supervisor was started with a new token, and continues."""

    message: str
    """Why."""


class JournalDamaged(
    JobEvent,
    type="supervisor.journal_damaged",
    severity=Severity.WARNING,
    text="the supervisor's journal is damaged: {lost:count change} lost, it continues from before",
):
    """A restarted supervisor could not read a part of its journal, and continues from an older state: the group forms
    again if it has done so since, and events that were not stored yet are lost."""

    lost: int
    """Changes of the state that cannot be read."""


class NodeSuspected(
    OfNode, JobEvent, type="node.suspected", severity=Severity.ERROR, text="node {node_id:node} is suspected: {reason}"
):
    """A worker of this job was at fault, and the cause may be its node: no job starts workers there until a test of the
    node passes."""

    reason: str


class NodeCleared(
    OfNode,
    JobEvent,
    type="node.cleared",
    severity=Severity.SUCCESS,
    text="node {node_id:node} has passed its test after {suspected_s:duration}",
):
    """A node that this job suspected has passed its test."""

    suspected_s: float
    """Seconds since it was suspected."""
    reason: str
    """Why it was suspected."""


class NodeCordoned(
    OfNode,
    JobEvent,
    type="node.cordoned",
    severity=Severity.INFO,
    text="node {node_id:node} is cordoned: {reason}; its workers stay, and none is added",
):
    """A node with workers of this job is cordoned: they stay, and no further worker is placed there."""

    reason: str


class WebhookGaveUp(
    JobEvent,
    type="webhook.gave_up",
    severity=Severity.ERROR,
    text="webhook {hook}: {num_events:count event} given up after {failing_s:duration}: {receiver} {error}",
):
    """A receiver has not accepted events of this job for so long that they are not tried any more. No webhook is sent
    this event."""

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


class MetricsHookFailed(JobEvent, type="metrics.hook_failed", severity=Severity.WARNING):
    """The metrics hook of the job logs nothing at the moment. The job trains on, and its newest points are kept and
    sent again; the series of the job itself lacks nothing."""

    hook: str
    """`metrics.hook` of the spec."""
    message: str
    num_waiting: int
    """Points that are not logged yet; at the end of an attempt, that will not be."""
    num_dropped: int
    """Points that were dropped, since too many waited."""

    def describe(self) -> str:
        lost = f", {count_text(self.num_dropped, 'point')} dropped" if self.num_dropped else ""
        return (
            f"metrics hook {self.hook} logs nothing, {count_text(self.num_waiting, 'point')} waiting{lost}: "
            f"{self.message}; the job's log has what it printed"
        )
