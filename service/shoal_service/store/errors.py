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
    |   |-- IslandsNotEnded       the job of island 0 has the ledger of islands that have not ended
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

from shoal_service.problems import ServiceError, Unauthenticated
from shoal_workers.contract import JobState
from shoal_workers.contract.base import FieldError


class StoreError(ServiceError):
    """An error of the store that reaches a client."""


class StoreUnavailable(StoreError, code="store-unavailable", status=503, title="The store cannot be reached"):
    """The database does not answer, or is locked. Try again."""


class NotFound(StoreError, code="not-found", status=404, title="No such resource"):
    """No route has this path, or there is no such resource."""


@dataclass(eq=False)
class JobNotFound(
    NotFound,
    code="job-not-found",
    status=404,
    title="No such job",
    text="There is no job {job_id!r}. `shoal jobs` lists the jobs.",
):
    """No job has this id."""

    job_id: str


@dataclass(eq=False)
class ProjectNotFound(
    NotFound,
    code="project-not-found",
    status=404,
    title="No such project",
    text="There is no project {name!r}. `shoal quota list` lists the projects.",
):
    """The project is not defined. GET /v1/projects lists the projects."""

    name: str


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
class SweepNotFound(
    NotFound,
    code="sweep-not-found",
    status=404,
    title="No such sweep",
    text="Project {project} has no sweep {name!r}. `shoal jobs --label sweep` lists the jobs of all.",
):
    """GET /v1/sweeps lists the sweeps."""

    project: str
    name: str


@dataclass(eq=False)
class UserNotFound(
    NotFound,
    code="user-not-found",
    status=404,
    title="No such user",
    text="There is no user {name!r} with limits or jobs. `shoal quota list-users` lists the users.",
):
    """The user has neither limits nor jobs. GET /v1/users lists the users."""

    name: str


@dataclass(eq=False)
class TokenNotFound(
    NotFound,
    code="token-not-found",
    status=404,
    title="No such token",
    text="There is no token with the id {token_id!r}. `shoal token list` lists the tokens.",
):
    """GET /v1/tokens lists the tokens."""

    token_id: str


@dataclass(eq=False)
class CheckpointNotFound(
    NotFound,
    code="checkpoint-not-found",
    status=404,
    title="No such checkpoint",
    text="Job {job_id} has no checkpoint {name!r}. `shoal checkpoints {job_id}` lists them.",
):
    """GET /v1/jobs/{id}/checkpoints lists the checkpoints of a job."""

    job_id: str
    name: str


@dataclass(eq=False)
class ProfileNotFound(
    NotFound,
    code="profile-not-found",
    status=404,
    title="No such profile, or no such file of it",
    text="Job {job_id} has no profile {number}; the newest ones are kept. `shoal profiles {job_id}` lists them.",
):
    """GET /v1/jobs/{id}/profiles lists the profiles of a job with their files."""

    job_id: str
    number: int


@dataclass(eq=False)
class ClusterNotFound(
    NotFound,
    code="cluster-not-found",
    status=404,
    title="No such cluster",
    text="No cluster has joined as {cluster!r}. `shoal clusters` lists the clusters; `shoal join` adds one.",
):
    """No cluster has joined under this name. GET /v1/clusters lists the clusters."""

    cluster: str


@dataclass(eq=False)
class InvalidCursor(StoreError, code="invalid-cursor", status=400, title="Invalid cursor"):
    """Pass `next_cursor` of a page unchanged, or no cursor."""

    cursor: str

    def __str__(self) -> str:
        return f"cursor {self.cursor[:80]!r} is not a cursor of this service. Leave it out to get the first page."


class InvalidArchive(StoreError, code="code-mismatch", status=422, title="The archive does not match its name"):
    """The SHA-256 of the body differs from the one in the path, or the body is not a valid zip archive."""


class Conflict(StoreError, code="request-conflict", status=409, title="Not possible now"):
    """The state of the job or node does not allow this."""


@dataclass(eq=False)
class IdempotencyConflict(
    Conflict, code="idempotency-conflict", status=409, title="Idempotency key belongs to another spec"
):
    """An earlier request with this Idempotency-Key had another spec. Use a new key for a new job."""

    key: str
    job_id: str

    def __str__(self) -> str:
        return (
            f"Idempotency-Key {self.key[:80]!r} belongs to job {self.job_id}, which has another spec. "
            "Send the same spec, or use another key."
        )


@dataclass(eq=False)
class RequestConflict(Conflict, text="Job {job_id} is {state}: it cannot {action}."):
    job_id: str
    state: JobState
    action: str


class JobEnded(
    RequestConflict,
    code="job-ended",
    status=409,
    title="The job has ended",
    text="Job {job_id} has ended ({state}): it cannot {action}. Submit it as a new job.",
):
    """A job that has ended can be read but not changed, except its name, labels and annotations."""


class JobNotEnded(
    RequestConflict,
    text="Job {job_id} is {state}: it cannot {action} before it has ended. Cancel it first: `shoal cancel {job_id}`.",
):
    """The text names the state and the way out."""


@dataclass(eq=False)
class IslandsNotEnded(Conflict):
    """The ledger of islands goes with the job of island 0."""

    job_id: str
    others: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"Job {self.job_id} has the rounds of islands that have not ended ({len(self.others)}): it cannot be "
            f"deleted before them. Wait for their end, or cancel them first: `shoal cancel {' '.join(self.others)}`."
        )


class LifecycleConflict(RequestConflict, text="Job {job_id} is {state} and cannot {action}."):
    """The text names the state and the way out."""


@dataclass(eq=False)
class TooManyViews(
    Conflict, text="The project {project} has {max_views} views, and its limit is as many. Delete one first."
):
    project: str
    max_views: int


@dataclass(eq=False)
class QueueFull(Conflict, code="queue-full", status=409, title="The project or the user has enough queued jobs"):
    """`max_queued` of the user, of the project, or of one above it, is reached. Nothing was submitted."""

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
class SweepConflict(
    Conflict,
    code="sweep-conflict",
    status=409,
    title="The name is that of another sweep",
    text=(
        "Project {project} has a sweep {name!r} with another job number {number} ({job_id}). Use another name "
        "for the sweep, or repeat the request as it was."
    ),
):
    """The project has a sweep with this name and other jobs. Use another name, or repeat the request as it was."""

    project: str
    name: str
    number: int
    job_id: str


@dataclass(eq=False)
class ProjectConflict(
    Conflict,
    code="project-conflict",
    status=409,
    title="The project cannot be changed so",
    text="Project {name} cannot be changed: {reason}.",
):
    """Its parent is not defined, it would be above itself, or it is the parent of another project."""

    name: str
    reason: str


@dataclass(eq=False)
class CheckpointConflict(
    Conflict,
    code="checkpoint-conflict",
    status=409,
    title="Not possible for this checkpoint",
    text="Checkpoint {name} of job {job_id} is {state}: {rule}.",
):
    """Only a committed checkpoint can be pinned, and only one that is in the storage deleted or verified."""

    job_id: str
    name: str
    state: str
    rule: str
    """Which checkpoints the request is possible for."""


@dataclass(eq=False)
class CheckpointKept(
    Conflict,
    code="checkpoint-kept",
    status=409,
    title="The checkpoint is needed",
    text="Checkpoint {name} of job {job_id} cannot be deleted: {reason}.",
):
    """It is pinned, or it is the newest one of a job that has not ended. The detail names the way out."""

    job_id: str
    name: str
    reason: str
    """It names the way out."""


@dataclass(eq=False)
class ProfileOpen(
    Conflict,
    code="profile-open",
    status=409,
    title="Another profile is being taken",
    text=(
        "Profile {number} of job {job_id} (rank {rank}) is being taken, and a job has one at a time. Ask again "
        "once it has ended; `shoal profiles {job_id}` shows it."
    ),
):
    """A job has one open request at a time. Ask again once it has ended."""

    job_id: str
    number: int
    rank: int


@dataclass(eq=False)
class ClusterConflict(
    Conflict,
    code="cluster-conflict",
    status=409,
    title="The cluster cannot be removed now",
    text="Cluster {cluster} cannot be removed: {reason}.",
):
    """Jobs have attempts there, or its gateway is one of this service. The detail names the way out."""

    cluster: str
    reason: str
    """It names the way out."""


@dataclass(eq=False)
class MoveRefused(
    Conflict,
    code="move-refused",
    status=409,
    title="The job cannot run in that cluster",
    text="Job {job_id} cannot be moved to cluster {target}: {reason}.",
):
    """It is away, cordoned or too small, or it cannot read the job's checkpoints. The detail names the way out."""

    job_id: str
    target: str
    reason: str
    """It names the way out."""


@dataclass(eq=False)
class _ClusterRefused(Conflict, text="{reason}"):
    cluster: str
    reason: str


class GatewayRefused(
    _ClusterRefused, code="gateway-refused", status=409, title="Another gateway speaks for the cluster"
):
    """One gateway at a time reports a cluster and carries out its orders. This one may stand by and ask again."""


class ClusterNameTaken(
    _ClusterRefused, code="cluster-name-taken", status=403, title="Another Ray cluster has this name"
):
    """A name is that of one Ray cluster. The detail names the way out."""


@dataclass(eq=False)
class PreconditionFailed(
    StoreError,
    code="precondition-failed",
    status=412,
    title="The job has changed",
    text=(
        "Job {job_id} has changed: If-Match is {given:.80}, the job's etag is {current}. Read the job again and repeat "
        "the change."
    ),
):
    """If-Match does not name the current ETag. Read the job again, then repeat the change."""

    job_id: str
    current: str
    given: str


@dataclass(eq=False)
class AttemptTokenRefused(
    StoreError, text="Attempt {attempt} of job {job_id} has ended, or this token is not its token."
):
    kind = Unauthenticated.kind
    job_id: str
    attempt: int


@dataclass(eq=False)
class SupervisorReplaced(
    StoreError,
    code="supervisor-replaced",
    status=409,
    title="The attempt has a later supervisor",
    text="Supervisor {life} of the attempt was replaced by supervisor {current_life}, and has to end.",
):
    """Only the newest supervisor of an attempt may report. This one has to end."""

    life: int
    current_life: int


@dataclass(eq=False)
class LeaseLost(FieldError, text="The lease of epoch {epoch} is lost: {owner!r} holds it with epoch {current_epoch}."):
    epoch: int
    current_epoch: int
    owner: str


class BackupError(ValueError):
    """A backup cannot be made or restored; the message names the way out. Nothing was changed, unless it says so."""
