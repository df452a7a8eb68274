"""The job as a whole: accepted, changed by its user, moved between states, granted workers, its code and its profiles.

A version of the code is named by the SHA-256 of its archive; empty: it is not known.
"""

from __future__ import annotations

from typing import Literal

from shoal_service.core.desired import Desired
from shoal_service.core.events.base import ByUser, JobEvent, OfCode, OfProfile, Severity
from shoal_service.core.quantities import count_text
from shoal_workers.contract import ANY_CLUSTER, JobState, ParallelismSpec

_SEVERITY_OF_STATE = {
    JobState.SUCCEEDED: Severity.SUCCESS,
    JobState.FAILED: Severity.ERROR,
    JobState.CANCELLED: Severity.WARNING,
    JobState.WAITING: Severity.WARNING,
    JobState.RECOVERING: Severity.WARNING,
}


class JobCreated(
    ByUser,
    JobEvent,
    type="job.created",
    severity=Severity.INFO,
    text="job created[ as {name}][, goes on from {from_job} after step {from_step}]",
):
    """The job was accepted."""

    name: str
    spec_version: int
    from_job: str | None = None
    """The job whose checkpoint it goes on from."""
    from_step: int | None = None
    """Completed steps of that checkpoint."""


class JobQuarantined(JobEvent, type="job.quarantined", severity=Severity.ERROR, text="job quarantined: {message}"):
    """The stored spec cannot be read by this release, so no supervisor runs the job."""

    message: str


class JobStateChanged(JobEvent, type="job.state", severity=Severity.INFO):
    """The job reached another state."""

    from_: JobState
    to: JobState
    reason: str
    """Reason for programs; an end reason if the attempt ended."""
    message: str
    attempt: int | None = None
    step: int | None = None
    workers: int | None = None
    """Workers that the attempt starts with."""
    cluster: str | None = None
    """Cluster in which the attempt starts."""
    others: dict[str, int] | None = None
    """Workers by the id of the job that gives them to this one. Unset: no job gives any."""

    def describe(self) -> str:
        attempt = f"attempt {self.attempt}" if self.attempt and self.to is JobState.STARTING else ""
        reason = f" ({attempt or self.reason})" if attempt or self.reason else ""
        message = f": {self.message}" if self.message else ""
        return f"job {self.from_} -> {self.to}{reason}{message}"

    def severity_of_this(self) -> Severity:
        return _SEVERITY_OF_STATE.get(self.to, self.severity)


class JobRequested(
    ByUser, JobEvent, type="job.requested", severity=Severity.INFO, text="[{by}|a user] asked to {desired} the job"
):
    """A user asked to run, pause or cancel the job."""

    desired: Desired


class JobExtended(ByUser, JobEvent, type="job.extended", severity=Severity.INFO):
    """A user let the job go on to more steps."""

    spec_version: int
    steps: int
    """Steps that the job is to complete in all."""
    done: int
    """Completed so far."""
    reopened: bool
    """It had ended, and returned to the queue."""

    def describe(self) -> str:
        return f"extended to {count_text(self.steps, 'step')}, {self.done} done" + (
            ", goes on in place" if self.reopened else ""
        )


class JobRetried(
    ByUser, JobEvent, type="job.retried", severity=Severity.INFO, text="tried again after {reason} at step {done}"
):
    """A user let the failed job try again, from its newest checkpoint."""

    done: int
    """Completed steps when it failed."""
    reason: str
    """Why it had failed."""


class JobArchived(ByUser, JobEvent, type="job.archived", severity=Severity.INFO):
    """A user archived the ended job, so that lists leave it out, or took it back into them."""

    archived: bool

    def describe(self) -> str:
        return "archived: lists leave it out" if self.archived else "no longer archived"


class JobPatched(ByUser, JobEvent, type="job.patched", severity=Severity.INFO):
    """A user changed the spec; of an ended job only name, labels and annotations. `generation.settings` says when
    training follows."""

    spec_version: int
    name: str | None = None
    elasticity: dict[str, int | float] | None = None
    """Only the keys that were changed."""
    parallelism: Literal["auto"] | ParallelismSpec | None = None
    priority: int | None = None
    finish_by: float | None = None
    stop: dict[str, int | float | None] | None = None
    schedule: dict[str, str | int | float | None] | None = None
    """Only the keys that were changed; `validation` and `optimizer` too."""
    validation: dict[str, str | int | float | None] | None = None
    optimizer: dict[str, float] | None = None
    weights: dict[str, float] | None = None
    """New weights of a mixture's sources; `generation.settings` says when the workers have learned of them."""
    at_step: int | None = None
    """First step with these weights."""
    worker: dict[str, str] | None = None
    """`job.move_requested` says from where."""
    code: dict[str, str] | None = None
    """`code.updated` says when the new code trains."""
    labels: dict[str, str | None] | None = None
    """Only those that were changed; null: removed."""
    annotations: tuple[str, ...] | None = None
    """Names of those that were changed."""
    alerts: tuple[str, ...] | None = None

    def describe(self) -> str:
        others = {"spec_version", "at_step", "by"}
        changed = [name for name in type(self).model_fields if name not in others and getattr(self, name) is not None]
        when = "" if self.at_step is None else f" from step {self.at_step} on"
        return f"spec changed to version {self.spec_version}" + (f": {', '.join(changed)}{when}" if changed else "")


class JobMoveRequested(ByUser, JobEvent, type="job.move_requested", severity=Severity.INFO):
    """A user asked that the job run in another cluster. An attempt elsewhere saves and ends, and the job goes on there
    without losing a step."""

    from_: str
    """The cluster that the spec named before; `any`: the one that the scheduler chooses. `to` too."""
    to: str
    spec_version: int
    running_in: str = ""
    """The cluster in which it has an attempt; empty: it has none."""

    def describe(self) -> str:
        who = self.by or "a user"
        if self.to == ANY_CLUSTER:
            return f"{who} lets the job run in any cluster (before: {self.from_})"
        if self.running_in == self.to:
            return f"{who} keeps the job in cluster {self.to}"
        return f"{who} moves the job to cluster {self.to}" + (f" from {self.running_in}" if self.running_in else "")


class JobStaysInCluster(
    JobEvent, type="job.stays_in_cluster", severity=Severity.WARNING, text="stays in cluster {cluster}: {reason}"
):
    """The job should leave its cluster, because it was asked to move or the cluster does not answer. It cannot for now.
    It goes on as soon as the reason is gone."""

    cluster: str
    """Cluster in which the job's attempt is."""
    reason: str


class JobGranted(
    JobEvent, type="job.granted", severity=Severity.INFO, text="granted {to:count worker} (before: {from_})[: {reason}]"
):
    """The scheduler allows another world size."""

    from_: int
    to: int
    reason: str
    others: dict[str, int] | None = None
    """Workers by the id of the job that gives them, if there are more than before, or gets them, if there are fewer.
    Unset: they were free, or become free."""


class JobHeldBack(
    JobEvent,
    type="job.held_back",
    severity=Severity.INFO,
    text="stays at {workers} of {max_workers:count worker}: {reason}",
):
    """The spec was changed, and the scheduler grants fewer workers than `elasticity.max_workers`."""

    workers: int
    """Granted."""
    max_workers: int
    limit: str
    """For programs: `no_faster`, `quota`, `no_room`, `others_gain_more` or `pause_costs_more`."""
    reason: str


class JobPreempted(
    JobEvent,
    type="job.preempted",
    severity=Severity.WARNING,
    text="preempted, gives {workers:count worker}[ to {beneficiary}]: {reason}",
):
    """The scheduler takes all workers of the job for another one. It saves, and returns to the queue."""

    workers: int
    """Workers that the job had."""
    beneficiary: str
    """The job that gets them; empty: a limit of its project takes them."""
    reason: str
    others: dict[str, int] | None = None
    """Workers by the id of the job that gets them. Unset: they become free."""


class JobOutperformed(JobEvent, type="job.outperformed", severity=Severity.WARNING):
    """Other jobs of its sweep are better at the same step. The job is ended, as by a cancel."""

    sweep: str
    measure: str
    """What was compared: `validation loss` or `training loss`."""
    step: int
    value: float | None
    """Loss of this job; null: not a number."""
    median: float | None
    """Median loss of the other jobs at this step; with halving, loss of the worst job that passes the rung. null: not a
    number."""
    num_others: int
    num_kept: int | None = None
    """Number of jobs that pass the rung; null: the rule is the median."""

    def describe(self) -> str:
        value = "not a number" if self.value is None else f"{self.value:.4g}"
        if self.num_kept is not None:
            return (
                f"pruned from sweep {self.sweep}: its {self.measure} at step {self.step} is {value}, and "
                f"{self.num_kept} of {count_text(self.num_others + 1, 'job')} pass this rung, with "
                f"{_loss(self.median)} or less"
            )
        return (
            f"pruned from sweep {self.sweep}: its {self.measure} at step {self.step} is {value}, worse than "
            f"{_loss(self.median)}, the median of {count_text(self.num_others, 'other job')}"
        )


def _loss(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.4g}"


class JobWaiting(
    JobEvent,
    type="job.waiting",
    severity=Severity.WARNING,
    text="waiting for workers[ on other nodes: {reason}|: {warm} warm, at least {min_workers} needed]",
):
    """Fewer than `elasticity.min_workers` workers are warm, the job backs off before its next group, or its workers do
    not fit into the memory of their nodes."""

    warm: int
    min_workers: int
    until: float
    """Seconds since the epoch; the job fails then."""
    reason: str = ""
    """What the workers need of the memory of a node; "": they are too few."""


class JobPruned(
    JobEvent, type="job.pruned", severity=Severity.INFO, text="{what} deleted ({rows:count row}): {reason}"
):
    """The job ended long ago, and retention has deleted a part of its history."""

    what: str
    """`logs`, `series` or `events`."""
    rows: int
    reason: str


class CodeUpdating(
    OfCode,
    JobEvent,
    type="code.updating",
    severity=Severity.INFO,
    text="workers with code {version:code} start beside those that train with {before:code}",
):
    """Workers with the new code start beside those that train."""


class CodeUpdated(
    OfCode,
    JobEvent,
    type="code.updated",
    severity=Severity.SUCCESS,
    text="code {version:code} trains since step {step:next}[, after a pause of {pause_s:.2f} s]",
):
    """The new code has trained its first steps, and stays. The workers with the code before end."""

    step: int
    """Completed steps when it took over: the next one was the first with the new code."""
    pause_s: float | None
    """Seconds from the last step with the code before to the group with the new code; null: not measured."""
    step_s: float | None
    """Median seconds of its first steps, the very first left out; null: the job ended before."""
    step_s_before: float | None
    """Median seconds of the last steps with the code before; null: there were too few."""


class CodeRolledBack(
    OfCode,
    JobEvent,
    type="code.rolled_back",
    severity=Severity.WARNING,
    text="code {version:code} is rolled back, and {before:code} goes on from step {step}: {reason}",
):
    """The new code failed, computed a value that is not finite, or was slower: the code before trains again."""

    step: int
    """The code before goes on from the state after this step."""
    reason: str


class CodeRefused(
    OfCode,
    JobEvent,
    type="code.refused",
    severity=Severity.WARNING,
    text="code {version:code} is refused, and {before:code} trains on: {reason}",
):
    """The new code cannot take over. The group has trained on with its own."""

    reason: str


class ProfileRequested(
    OfProfile,
    JobEvent,
    type="profile.requested",
    severity=Severity.INFO,
    text="profile {number} requested: rank {rank}, {steps:count step}",
):
    """A user has requested a profile of one rank."""

    steps: int


class ProfileTaken(
    OfProfile,
    JobEvent,
    type="profile.taken",
    severity=Severity.SUCCESS,
    text="profile {number} of rank {rank} taken: steps {first_step} to {last_step}, {step_s:duration} "
    "each; training was held up for {held_s:duration}",
):
    """A profile is complete: its table and its files can be read."""

    first_step: int
    last_step: int
    step_s: float
    """Mean length of the profiled steps."""
    held_s: float
    """Seconds in which the worker did not train because of it."""


class ProfileFailed(
    OfProfile,
    JobEvent,
    type="profile.failed",
    severity=Severity.WARNING,
    text="profile {number} of rank {rank} failed: {reason}",
):
    """A requested profile could not be taken; training is not touched."""

    reason: str
