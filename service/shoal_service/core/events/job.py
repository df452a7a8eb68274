"""The job as a whole: accepted, changed by its user, moved between states, granted workers, its code and its profiles.

A version of the code is named by the SHA-256 of its archive; empty: it is not known.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from shoal_service.core.desired import Desired
from shoal_service.core.events.base import JobEvent, Severity
from shoal_service.core.quantities import count_text, duration_text
from shoal_workers.contract import ANY_CLUSTER, JobState, ParallelismSpec

_SEVERITY_OF_STATE = {
    JobState.SUCCEEDED: Severity.SUCCESS,
    JobState.FAILED: Severity.ERROR,
    JobState.CANCELLED: Severity.WARNING,
    JobState.WAITING: Severity.WARNING,
    JobState.RECOVERING: Severity.WARNING,
}
_REQUESTS = {Desired.RUN: "run", Desired.PAUSE: "pause", Desired.CANCEL: "cancel"}


class JobCreated(JobEvent):
    """The job was accepted."""

    type: ClassVar[str] = "job.created"
    severity: ClassVar[Severity] = Severity.INFO

    name: str
    spec_version: int
    from_job: str | None = None
    """The job whose checkpoint it goes on from."""
    from_step: int | None = None
    """Completed steps of that checkpoint."""
    by: str | None = None
    """Name of the one who asked through the API."""

    def words(self) -> str:
        origin = f", goes on from {self.from_job} after step {self.from_step}" if self.from_job else ""
        return (f"job created as {self.name}" if self.name else "job created") + origin


class JobQuarantined(JobEvent):
    """The stored spec cannot be read by this release, so no supervisor runs the job."""

    type: ClassVar[str] = "job.quarantined"
    severity: ClassVar[Severity] = Severity.ERROR

    message: str

    def words(self) -> str:
        return f"job quarantined: {self.message}"


class JobStateChanged(JobEvent):
    """The job reached another state."""

    type: ClassVar[str] = "job.state"
    severity: ClassVar[Severity] = Severity.INFO

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

    def words(self) -> str:
        attempt = f"attempt {self.attempt}" if self.attempt and self.to is JobState.STARTING else ""
        reason = f" ({attempt or self.reason})" if attempt or self.reason else ""
        message = f": {self.message}" if self.message else ""
        return f"job {self.from_} -> {self.to}{reason}{message}"

    def severity_of_this(self) -> Severity:
        return _SEVERITY_OF_STATE.get(self.to, self.severity)


class JobRequested(JobEvent):
    """A user asked to run, pause or cancel the job."""

    type: ClassVar[str] = "job.requested"
    severity: ClassVar[Severity] = Severity.INFO

    desired: Desired
    by: str | None = None
    """Name of the one who asked through the API."""

    def words(self) -> str:
        return f"{self.by or 'a user'} asked to {_REQUESTS[self.desired]} the job"


class JobExtended(JobEvent):
    """A user let the job go on to more steps."""

    type: ClassVar[str] = "job.extended"
    severity: ClassVar[Severity] = Severity.INFO

    spec_version: int
    steps: int
    """Steps that the job is to complete in all."""
    done: int
    """Completed so far."""
    reopened: bool
    """It had ended, and returned to the queue."""
    by: str | None = None
    """Name of the one who asked through the API."""

    def words(self) -> str:
        return f"extended to {count_text(self.steps, 'step')}, {self.done} done" + (
            ", goes on in place" if self.reopened else ""
        )


class JobRetried(JobEvent):
    """A user let the failed job try again, from its newest checkpoint."""

    type: ClassVar[str] = "job.retried"
    severity: ClassVar[Severity] = Severity.INFO

    done: int
    """Completed steps when it failed."""
    reason: str
    """Why it had failed."""
    by: str | None = None
    """Name of the one who asked through the API."""

    def words(self) -> str:
        return f"tried again after {self.reason} at step {self.done}"


class JobArchived(JobEvent):
    """A user archived the ended job, so that lists leave it out, or took it back into them."""

    type: ClassVar[str] = "job.archived"
    severity: ClassVar[Severity] = Severity.INFO

    archived: bool
    by: str | None = None
    """Name of the one who asked through the API."""

    def words(self) -> str:
        return "archived: lists leave it out" if self.archived else "no longer archived"


class JobPatched(JobEvent):
    """A user changed the spec; of an ended job only name, labels and annotations. `generation.settings` says when
    training follows."""

    type: ClassVar[str] = "job.patched"
    severity: ClassVar[Severity] = Severity.INFO

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
    by: str | None = None
    """Name of the one who asked through the API."""

    def words(self) -> str:
        others = {"spec_version", "at_step", "by"}
        changed = [name for name in type(self).model_fields if name not in others and getattr(self, name) is not None]
        when = "" if self.at_step is None else f" from step {self.at_step} on"
        return f"spec changed to version {self.spec_version}" + (f": {', '.join(changed)}{when}" if changed else "")


class JobMoveRequested(JobEvent):
    """A user asked that the job run in another cluster. An attempt elsewhere saves and ends, and the job goes on there
    without losing a step."""

    type: ClassVar[str] = "job.move_requested"
    severity: ClassVar[Severity] = Severity.INFO

    from_: str
    """The cluster that the spec named before; `any`: the one that the scheduler chooses. `to` too."""
    to: str
    spec_version: int
    running_in: str = ""
    """The cluster in which it has an attempt; empty: it has none."""
    by: str | None = None
    """Name of the one who asked through the API."""

    def words(self) -> str:
        who = self.by or "a user"
        if self.to == ANY_CLUSTER:
            return f"{who} lets the job run in any cluster (before: {self.from_})"
        if self.running_in == self.to:
            return f"{who} keeps the job in cluster {self.to}"
        return f"{who} moves the job to cluster {self.to}" + (f" from {self.running_in}" if self.running_in else "")


class JobStaysInCluster(JobEvent):
    """The job should leave its cluster, because it was asked to move or the cluster does not answer. It cannot for now.
    It goes on as soon as the reason is gone."""

    type: ClassVar[str] = "job.stays_in_cluster"
    severity: ClassVar[Severity] = Severity.WARNING

    cluster: str
    """Cluster in which the job's attempt is."""
    reason: str

    def words(self) -> str:
        return f"stays in cluster {self.cluster}: {self.reason}"


class JobGranted(JobEvent):
    """The scheduler allows another world size."""

    type: ClassVar[str] = "job.granted"
    severity: ClassVar[Severity] = Severity.INFO

    from_: int
    to: int
    reason: str
    others: dict[str, int] | None = None
    """Workers by the id of the job that gives them, if there are more than before, or gets them, if there are fewer.
    Unset: they were free, or become free."""

    def words(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"granted {count_text(self.to, 'worker')} (before: {self.from_}){reason}"


class JobHeldBack(JobEvent):
    """The spec was changed, and the scheduler grants fewer workers than `elasticity.max_workers`."""

    type: ClassVar[str] = "job.held_back"
    severity: ClassVar[Severity] = Severity.INFO

    workers: int
    """Granted."""
    max_workers: int
    limit: str
    """For programs: `no_faster`, `quota`, `no_room`, `others_gain_more` or `pause_costs_more`."""
    reason: str

    def words(self) -> str:
        return f"stays at {self.workers} of {count_text(self.max_workers, 'worker')}: {self.reason}"


class JobPreempted(JobEvent):
    """The scheduler takes all workers of the job for another one. It saves, and returns to the queue."""

    type: ClassVar[str] = "job.preempted"
    severity: ClassVar[Severity] = Severity.WARNING

    workers: int
    """Workers that the job had."""
    beneficiary: str
    """The job that gets them; empty: a limit of its project takes them."""
    reason: str
    others: dict[str, int] | None = None
    """Workers by the id of the job that gets them. Unset: they become free."""

    def words(self) -> str:
        to = f" to {self.beneficiary}" if self.beneficiary else ""
        return f"preempted, gives {count_text(self.workers, 'worker')}{to}: {self.reason}"


class JobOutperformed(JobEvent):
    """Other jobs of its sweep are better at the same step. The job is ended, as by a cancel."""

    type: ClassVar[str] = "job.outperformed"
    severity: ClassVar[Severity] = Severity.WARNING

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

    def words(self) -> str:
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


class JobWaiting(JobEvent):
    """Fewer than `elasticity.min_workers` workers are warm, the job backs off before its next group, or its workers do
    not fit into the memory of their nodes."""

    type: ClassVar[str] = "job.waiting"
    severity: ClassVar[Severity] = Severity.WARNING

    warm: int
    min_workers: int
    until: float
    """Seconds since the epoch; the job fails then."""
    reason: str = ""
    """What the workers need of the memory of a node; "": they are too few."""

    def words(self) -> str:
        if self.reason:
            return f"waiting for workers on other nodes: {self.reason}"
        return f"waiting for workers: {self.warm} warm, at least {self.min_workers} needed"


class JobPruned(JobEvent):
    """The job ended long ago, and retention has deleted a part of its history."""

    type: ClassVar[str] = "job.pruned"
    severity: ClassVar[Severity] = Severity.INFO

    what: str
    """`logs`, `series` or `events`."""
    rows: int
    reason: str

    def words(self) -> str:
        return f"{self.what} deleted ({count_text(self.rows, 'row')}): {self.reason}"


class CodeUpdating(JobEvent):
    """Workers with the new code start beside those that train."""

    type: ClassVar[str] = "code.updating"
    severity: ClassVar[Severity] = Severity.INFO

    version: str
    before: str
    """The version that trains."""

    def words(self) -> str:
        return f"workers with code {_short(self.version)} start beside those that train with {_short(self.before)}"


class CodeUpdated(JobEvent):
    """The new code has trained its first steps, and stays. The workers with the code before end."""

    type: ClassVar[str] = "code.updated"
    severity: ClassVar[Severity] = Severity.SUCCESS

    version: str
    before: str
    step: int
    """Completed steps when it took over: the next one was the first with the new code."""
    pause_s: float | None
    """Seconds from the last step with the code before to the group with the new code; null: not measured."""
    step_s: float | None
    """Median seconds of its first steps, the very first left out; null: the job ended before."""
    step_s_before: float | None
    """Median seconds of the last steps with the code before; null: there were too few."""

    def words(self) -> str:
        pause = f", after a pause of {self.pause_s:.2f} s" if self.pause_s is not None else ""
        return f"code {_short(self.version)} trains since step {self.step + 1}{pause}"


class CodeRolledBack(JobEvent):
    """The new code failed, computed a value that is not finite, or was slower: the code before trains again."""

    type: ClassVar[str] = "code.rolled_back"
    severity: ClassVar[Severity] = Severity.WARNING

    version: str
    """The one that was rolled back."""
    before: str
    step: int
    """The code before goes on from the state after this step."""
    reason: str

    def words(self) -> str:
        goes_on = f"{_short(self.before)} goes on from step {self.step}"
        return f"code {_short(self.version)} is rolled back, and {goes_on}: {self.reason}"


class CodeRefused(JobEvent):
    """The new code cannot take over. The group has trained on with its own."""

    type: ClassVar[str] = "code.refused"
    severity: ClassVar[Severity] = Severity.WARNING

    version: str
    before: str
    """The version that trains on."""
    reason: str

    def words(self) -> str:
        return f"code {_short(self.version)} is refused, and {_short(self.before)} trains on: {self.reason}"


def _short(version: str) -> str:
    return version[:12] or "the code before"


class ProfileRequested(JobEvent):
    """A user has requested a profile of one rank."""

    type: ClassVar[str] = "profile.requested"
    severity: ClassVar[Severity] = Severity.INFO

    number: int
    rank: int
    steps: int

    def words(self) -> str:
        return f"profile {self.number} requested: rank {self.rank}, {count_text(self.steps, 'step')}"


class ProfileTaken(JobEvent):
    """A profile is complete: its table and its files can be read."""

    type: ClassVar[str] = "profile.taken"
    severity: ClassVar[Severity] = Severity.SUCCESS

    number: int
    rank: int
    first_step: int
    last_step: int
    step_s: float
    """Mean length of the profiled steps."""
    held_s: float
    """Seconds in which the worker did not train because of it."""

    def words(self) -> str:
        steps = f"steps {self.first_step} to {self.last_step}, {duration_text(self.step_s)} each"
        held = f"training was held up for {duration_text(self.held_s)}"
        return f"profile {self.number} of rank {self.rank} taken: {steps}; {held}"


class ProfileFailed(JobEvent):
    """A requested profile could not be taken; training is not touched."""

    type: ClassVar[str] = "profile.failed"
    severity: ClassVar[Severity] = Severity.WARNING

    number: int
    rank: int
    reason: str

    def words(self) -> str:
        return f"profile {self.number} of rank {self.rank} failed: {self.reason}"
