"""Errors of the store. The `kind` of a class tells a client what it means, see `problems.py`.

    StoreError
    |-- StoreUnavailable      the database cannot be opened or has no driver
    |-- NotFound
    |   |-- JobNotFound
    |   |-- ProjectNotFound
    |   |-- SweepNotFound
    |   |-- UserNotFound
    |   |-- ViewNotFound
    |   |-- TokenNotFound
    |   |-- CheckpointNotFound
    |   |-- ProfileNotFound
    |   |-- ModelNotFound
    |   `-- ClusterNotFound
    |-- InvalidCursor         a page cursor that this service did not create
    |-- InvalidArchive        a code archive that is too large, or does not match the SHA-256 in its name
    |-- Conflict
    |   |-- IdempotencyConflict   the key was used with another spec
    |   |-- RequestConflict       the request is impossible in the job's state
    |   |   |-- JobEnded          ... because the job has ended
    |   |   |-- JobNotEnded       ... because the job has not ended
    |   |   `-- LifecycleConflict     the job cannot go on in this way; the message names the way out
    |   |-- SweepConflict         the name is that of a sweep with other jobs
    |   |-- TooManyViews          the project has as many saved views as it may have
    |   |-- QueueFull             the project or the user has as many queued jobs as allowed
    |   |   `-- SweepTooLarge         ... with the jobs of a sweep, of which none was submitted
    |   |-- CheckpointConflict    the checkpoint is damaged, deleted or was never committed
    |   |-- CheckpointKept        the checkpoint is pinned, or the job would resume from it
    |   |-- ProfileOpen           the profile before this one is not ended
    |   |-- ProjectConflict       the project cannot have these quotas, or cannot be deleted
    |   |-- GatewayRefused        another gateway speaks for the cluster
    |   |-- ClusterNameTaken      another Ray cluster has the name
    |   |-- ClusterConflict       the cluster cannot be removed now; the message names the way out
    |   `-- MoveRefused           the job cannot run in that cluster; the message names the way out
    |-- PreconditionFailed    If-Match named another version
    |-- AttemptTokenRefused   the token is not that of an attempt that goes on
    `-- SupervisorReplaced    the attempt has a later supervisor than the one that reports

    LeaseLost                 another control plane drives the jobs now; the caller must stop writing
    BackupError               raised when a backup is made or restored, not by a store

The last two never reach a client. Every class keeps its data as attributes and survives pickling.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.problems import ProblemKind, ServiceError, Unauthenticated
from shoal_workers.contract import JobState


class StoreError(ServiceError):
    """An error of the store that reaches a client."""


class StoreUnavailable(StoreError):
    kind = ProblemKind(
        "store-unavailable",
        503,
        "The store cannot be reached",
        "The database does not answer, or is locked. Try again.",
    )


class NotFound(StoreError):
    kind = ProblemKind("not-found", 404, "No such resource", "No route has this path, or there is no such resource.")


@dataclass(eq=False)
class JobNotFound(NotFound):
    kind = ProblemKind("job-not-found", 404, "No such job", "No job has this id.")
    job_id: str

    def __str__(self) -> str:
        return f"There is no job {self.job_id!r}. `shoal jobs` lists the jobs."


@dataclass(eq=False)
class ProjectNotFound(NotFound):
    kind = ProblemKind(
        "project-not-found", 404, "No such project", "The project is not defined. GET /v1/projects lists the projects."
    )
    name: str

    def __str__(self) -> str:
        return f"There is no project {self.name!r}. `shoal quota list` lists the projects."


@dataclass(eq=False)
class ViewNotFound(NotFound):
    project: str
    name: str

    def __str__(self) -> str:
        return (
            f"The project {self.project} has no view {self.name[:80]!r}. "
            f"GET /v1/views?project={self.project} lists the views."
        )


@dataclass(eq=False)
class ModelNotFound(NotFound):
    project: str
    name: str
    version: str
    """Version or alias."""

    def __str__(self) -> str:
        return (
            f"The project {self.project} has no model {self.name[:80]!r} with a version or alias "
            f"{self.version[:80]!r}. `shoal model list` lists the models."
        )


@dataclass(eq=False)
class SweepNotFound(NotFound):
    kind = ProblemKind("sweep-not-found", 404, "No such sweep", "GET /v1/sweeps lists the sweeps.")
    project: str
    name: str

    def __str__(self) -> str:
        return f"Project {self.project} has no sweep {self.name!r}. `shoal jobs --label sweep` lists the jobs of all."


@dataclass(eq=False)
class UserNotFound(NotFound):
    kind = ProblemKind(
        "user-not-found", 404, "No such user", "The user has neither limits nor jobs. GET /v1/users lists the users."
    )
    name: str

    def __str__(self) -> str:
        return f"There is no user {self.name!r} with limits or jobs. `shoal quota list-users` lists the users."


@dataclass(eq=False)
class TokenNotFound(NotFound):
    kind = ProblemKind("token-not-found", 404, "No such token", "GET /v1/tokens lists the tokens.")
    token_id: str

    def __str__(self) -> str:
        return f"There is no token with the id {self.token_id!r}. `shoal token list` lists the tokens."


@dataclass(eq=False)
class CheckpointNotFound(NotFound):
    kind = ProblemKind(
        "checkpoint-not-found",
        404,
        "No such checkpoint",
        "GET /v1/jobs/{id}/checkpoints lists the checkpoints of a job.",
    )
    job_id: str
    name: str

    def __str__(self) -> str:
        return f"Job {self.job_id} has no checkpoint {self.name!r}. `shoal checkpoints {self.job_id}` lists them."


@dataclass(eq=False)
class ProfileNotFound(NotFound):
    kind = ProblemKind(
        "profile-not-found",
        404,
        "No such profile, or no such file of it",
        "GET /v1/jobs/{id}/profiles lists the profiles of a job with their files.",
    )
    job_id: str
    number: int

    def __str__(self) -> str:
        return (
            f"Job {self.job_id} has no profile {self.number}; the newest ones are kept. `shoal profiles {self.job_id}` "
            f"lists them."
        )


@dataclass(eq=False)
class ClusterNotFound(NotFound):
    kind = ProblemKind(
        "cluster-not-found",
        404,
        "No such cluster",
        "No cluster has joined under this name. GET /v1/clusters lists the clusters.",
    )
    cluster: str

    def __str__(self) -> str:
        return f"No cluster has joined as {self.cluster!r}. `shoal clusters` lists the clusters; `shoal join` adds one."


@dataclass(eq=False)
class InvalidCursor(StoreError):
    kind = ProblemKind("invalid-cursor", 400, "Invalid cursor", "Pass `next_cursor` of a page unchanged, or no cursor.")
    cursor: str

    def __str__(self) -> str:
        return f"cursor {self.cursor[:80]!r} is not a cursor of this service. Leave it out to get the first page."


class InvalidArchive(StoreError):
    kind = ProblemKind(
        "code-mismatch",
        422,
        "The archive does not match its name",
        "The SHA-256 of the body differs from the one in the path, or the body is not a valid zip archive.",
    )


class Conflict(StoreError):
    kind = ProblemKind("request-conflict", 409, "Not possible now", "The state of the job or node does not allow this.")


@dataclass(eq=False)
class IdempotencyConflict(Conflict):
    kind = ProblemKind(
        "idempotency-conflict",
        409,
        "Idempotency key belongs to another spec",
        "An earlier request with this Idempotency-Key had another spec. Use a new key for a new job.",
    )
    key: str
    job_id: str

    def __str__(self) -> str:
        return (
            f"Idempotency-Key {self.key[:80]!r} belongs to job {self.job_id}, which has another spec. "
            "Send the same spec, or use another key."
        )


@dataclass(eq=False)
class RequestConflict(Conflict):
    job_id: str
    state: JobState
    action: str

    def __str__(self) -> str:
        return f"Job {self.job_id} is {self.state.value}: it cannot {self.action}."


class JobEnded(RequestConflict):
    kind = ProblemKind(
        "job-ended",
        409,
        "The job has ended",
        "A job that has ended can be read but not changed, except its name, labels and annotations.",
    )

    def __str__(self) -> str:
        return f"Job {self.job_id} has ended ({self.state.value}): it cannot {self.action}. Submit it as a new job."


class JobNotEnded(RequestConflict):
    def __str__(self) -> str:
        return (
            f"Job {self.job_id} is {self.state.value}: it cannot {self.action} before it has ended. Cancel it first: "
            f"`shoal cancel {self.job_id}`."
        )


class LifecycleConflict(RequestConflict):
    def __str__(self) -> str:
        return f"Job {self.job_id} is {self.state.value} and cannot {self.action}."


@dataclass(eq=False)
class TooManyViews(Conflict):
    project: str
    max_views: int

    def __str__(self) -> str:
        return f"The project {self.project} has {self.max_views} views, and its limit is as many. Delete one first."


@dataclass(eq=False)
class QueueFull(Conflict):
    kind = ProblemKind(
        "queue-full",
        409,
        "The project or the user has enough queued jobs",
        "`max_queued` of the user, of the project, or of one above it, is reached. Nothing was submitted.",
    )
    name: str
    """Name of the project, or of the user."""
    queued: int
    max_queued: int
    is_user: bool = False

    def __str__(self) -> str:
        if self.is_user:
            return (
                f"User {self.name} has {self.queued} queued jobs, and the user's max_queued is {self.max_queued}. Wait "
                f"until one has started, cancel one (`shoal jobs --user {self.name}` lists them), or raise the limit "
                f"(`shoal quota set-user {self.name} --max-queued N`)."
            )
        return (
            f"Project {self.name} has {self.queued} queued jobs, and its max_queued is {self.max_queued}. Wait "
            f"until one has started, cancel one (`shoal queue --project {self.name}` lists them), or raise the "
            f"limit (`shoal quota set {self.name} --max-queued N`)."
        )


class SweepTooLarge(QueueFull):
    def __str__(self) -> str:
        whose, way = ("user", "set-user") if self.is_user else ("project", "set")
        return (
            f"No job of the sweep was submitted: with all of them, {whose} {self.name} would have more queued "
            f"jobs than its max_queued, which is {self.max_queued}. Leave values out of the grid, wait until others "
            f"have started, or raise the limit (`shoal quota {way} {self.name} --max-queued N`)."
        )


@dataclass(eq=False)
class SweepConflict(Conflict):
    kind = ProblemKind(
        "sweep-conflict",
        409,
        "The name is that of another sweep",
        "The project has a sweep with this name and other jobs. Use another name, or repeat the request as it was.",
    )
    project: str
    name: str
    number: int
    job_id: str

    def __str__(self) -> str:
        return (
            f"Project {self.project} has a sweep {self.name!r} with another job number {self.number} ({self.job_id}). "
            "Use another name for the sweep, or repeat the request as it was."
        )


@dataclass(eq=False)
class ProjectConflict(Conflict):
    kind = ProblemKind(
        "project-conflict",
        409,
        "The project cannot be changed so",
        "Its parent is not defined, it would be above itself, or it is the parent of another project.",
    )
    name: str
    reason: str

    def __str__(self) -> str:
        return f"Project {self.name} cannot be changed: {self.reason}."


@dataclass(eq=False)
class CheckpointConflict(Conflict):
    kind = ProblemKind(
        "checkpoint-conflict",
        409,
        "Not possible for this checkpoint",
        "Only a committed checkpoint can be pinned, and only one that is in the storage deleted or verified.",
    )
    job_id: str
    name: str
    state: str
    rule: str
    """Which checkpoints the request is possible for."""

    def __str__(self) -> str:
        return f"Checkpoint {self.name} of job {self.job_id} is {self.state}: {self.rule}."


@dataclass(eq=False)
class CheckpointKept(Conflict):
    kind = ProblemKind(
        "checkpoint-kept",
        409,
        "The checkpoint is needed",
        "It is pinned, or it is the newest one of a job that has not ended. The detail names the way out.",
    )
    job_id: str
    name: str
    reason: str
    """It names the way out."""

    def __str__(self) -> str:
        return f"Checkpoint {self.name} of job {self.job_id} cannot be deleted: {self.reason}."


@dataclass(eq=False)
class ProfileOpen(Conflict):
    kind = ProblemKind(
        "profile-open",
        409,
        "Another profile is being taken",
        "A job has one open request at a time. Ask again once it has ended.",
    )
    job_id: str
    number: int
    rank: int

    def __str__(self) -> str:
        return (
            f"Profile {self.number} of job {self.job_id} (rank {self.rank}) is being taken, and a job has one at a "
            f"time. Ask again once it has ended; `shoal profiles {self.job_id}` shows it."
        )


@dataclass(eq=False)
class ClusterConflict(Conflict):
    kind = ProblemKind(
        "cluster-conflict",
        409,
        "The cluster cannot be removed now",
        "Jobs have attempts there, or its gateway is one of this service. The detail names the way out.",
    )
    cluster: str
    reason: str
    """It names the way out."""

    def __str__(self) -> str:
        return f"Cluster {self.cluster} cannot be removed: {self.reason}."


@dataclass(eq=False)
class MoveRefused(Conflict):
    kind = ProblemKind(
        "move-refused",
        409,
        "The job cannot run in that cluster",
        "It is away, cordoned or too small, or it cannot read the job's checkpoints. The detail names the way out.",
    )
    job_id: str
    target: str
    reason: str
    """It names the way out."""

    def __str__(self) -> str:
        return f"Job {self.job_id} cannot be moved to cluster {self.target}: {self.reason}."


@dataclass(eq=False)
class _ClusterRefused(Conflict):
    cluster: str
    reason: str

    def __str__(self) -> str:
        return self.reason


class GatewayRefused(_ClusterRefused):
    kind = ProblemKind(
        "gateway-refused",
        409,
        "Another gateway speaks for the cluster",
        "One gateway at a time reports a cluster and carries out its orders. This one may stand by and ask again.",
    )


class ClusterNameTaken(_ClusterRefused):
    kind = ProblemKind(
        "cluster-name-taken",
        403,
        "Another Ray cluster has this name",
        "A name is that of one Ray cluster. The detail names the way out.",
    )


@dataclass(eq=False)
class PreconditionFailed(StoreError):
    kind = ProblemKind(
        "precondition-failed",
        412,
        "The job has changed",
        "If-Match does not name the current ETag. Read the job again, then repeat the change.",
    )
    job_id: str
    current: str
    given: str

    def __str__(self) -> str:
        return (
            f"Job {self.job_id} has changed: If-Match is {self.given[:80]}, the job's etag is {self.current}. "
            "Read the job again and repeat the change."
        )


@dataclass(eq=False)
class AttemptTokenRefused(StoreError):
    kind = Unauthenticated.kind
    job_id: str
    attempt: int

    def __str__(self) -> str:
        return f"Attempt {self.attempt} of job {self.job_id} has ended, or this token is not its token."


@dataclass(eq=False)
class SupervisorReplaced(StoreError):
    kind = ProblemKind(
        "supervisor-replaced",
        409,
        "The attempt has a later supervisor",
        "Only the newest supervisor of an attempt may report. This one has to end.",
    )
    life: int
    current_life: int

    def __str__(self) -> str:
        return f"Supervisor {self.life} of the attempt was replaced by supervisor {self.current_life}, and has to end."


@dataclass(eq=False)
class LeaseLost(Exception):
    epoch: int
    current_epoch: int
    owner: str

    def __str__(self) -> str:
        return f"The lease of epoch {self.epoch} is lost: {self.owner!r} holds it with epoch {self.current_epoch}."


class BackupError(ValueError):
    """A backup cannot be made or restored; the message names the way out. Nothing was changed, unless it says so."""
