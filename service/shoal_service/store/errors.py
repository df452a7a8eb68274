"""The errors of the store. HTTP status codes are not known here; the HTTP edge maps the classes.

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
    |   |   |-- JobNotEnded       ... because it has not
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
    |-- SupervisorReplaced    the attempt has a later supervisor than the one that reports
    `-- LeaseLost             another control plane drives the jobs now; the caller must stop writing

BackupError is apart: no store raises it, but the making and the restoring of a backup.

Every class has a stable `code`, keeps its data as attributes and survives pickling.
"""

from __future__ import annotations

from typing import ClassVar

from shoal_workers.contract.job import JobState


class StoreError(Exception):
    code: ClassVar[str] = "store_error"


class StoreUnavailable(StoreError):
    code: ClassVar[str] = "store_unavailable"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotFound(StoreError):
    code: ClassVar[str] = "not_found"


class JobNotFound(NotFound):
    code: ClassVar[str] = "job_not_found"

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return f"There is no job {self.job_id!r}. `shoal jobs` lists the jobs."


class ProjectNotFound(NotFound):
    code: ClassVar[str] = "project_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"There is no project {self.name!r}. `shoal quota list` lists the projects."


class ViewNotFound(NotFound):
    code: ClassVar[str] = "view_not_found"

    def __init__(self, project: str, name: str) -> None:
        super().__init__(project, name)
        self.project = project
        self.name = name

    def __str__(self) -> str:
        lists = f"GET /v1/views?project={self.project} lists them."
        return f"The project {self.project} has no view {self.name[:80]!r}. {lists}"


class ModelNotFound(NotFound):
    code: ClassVar[str] = "model_not_found"

    def __init__(self, project: str, name: str, which: str) -> None:
        super().__init__(project, name, which)
        self.project = project
        self.name = name
        self.which = which

    def __str__(self) -> str:
        return (
            f"The project {self.project} has no model {self.name[:80]!r} with a version or alias {self.which[:80]!r}. "
            "`shoal model list` lists the models."
        )


class SweepNotFound(NotFound):
    code: ClassVar[str] = "sweep_not_found"

    def __init__(self, project: str, name: str) -> None:
        super().__init__(project, name)
        self.project = project
        self.name = name

    def __str__(self) -> str:
        return f"Project {self.project} has no sweep {self.name!r}. `shoal jobs --label sweep` lists the jobs of all."


class UserNotFound(NotFound):
    code: ClassVar[str] = "user_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"There is no user {self.name!r} with limits or jobs. `shoal quota list-users` lists the users."


class TokenNotFound(NotFound):
    code: ClassVar[str] = "token_not_found"

    def __init__(self, token_id: str) -> None:
        super().__init__(token_id)
        self.token_id = token_id

    def __str__(self) -> str:
        return f"There is no token with the id {self.token_id!r}. `shoal token list` lists the tokens."


class CheckpointNotFound(NotFound):
    code: ClassVar[str] = "checkpoint_not_found"

    def __init__(self, job_id: str, name: str) -> None:
        super().__init__(job_id, name)
        self.job_id = job_id
        self.name = name

    def __str__(self) -> str:
        return f"Job {self.job_id} has no checkpoint {self.name!r}. `shoal checkpoints {self.job_id}` lists them."


class InvalidCursor(StoreError):
    code: ClassVar[str] = "invalid_cursor"

    def __init__(self, cursor: str) -> None:
        super().__init__(cursor)
        self.cursor = cursor

    def __str__(self) -> str:
        return f"cursor {self.cursor[:80]!r} is not a cursor of this service. Leave it out to get the first page."


class InvalidArchive(StoreError):
    code: ClassVar[str] = "invalid_archive"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Conflict(StoreError):
    code: ClassVar[str] = "conflict"


class IdempotencyConflict(Conflict):
    code: ClassVar[str] = "idempotency_conflict"

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(key, job_id)
        self.key = key
        self.job_id = job_id

    def __str__(self) -> str:
        return (
            f"Idempotency-Key {self.key[:80]!r} belongs to job {self.job_id}, which has another spec. "
            "Send the same spec, or use another key."
        )


class RequestConflict(Conflict):
    code: ClassVar[str] = "request_conflict"

    def __init__(self, job_id: str, state: JobState, action: str) -> None:
        super().__init__(job_id, state, action)
        self.job_id = job_id
        self.state = state
        self.action = action

    def __str__(self) -> str:
        return f"Job {self.job_id} is {self.state.value}: it cannot {self.action}."


class JobEnded(RequestConflict):
    code: ClassVar[str] = "job_ended"

    def __str__(self) -> str:
        return f"Job {self.job_id} has ended ({self.state.value}): it cannot {self.action}. Submit it as a new job."


class JobNotEnded(RequestConflict):
    code: ClassVar[str] = "job_not_ended"

    def __str__(self) -> str:
        return (
            f"Job {self.job_id} is {self.state.value}: it cannot {self.action} before it has ended. Cancel it first: "
            f"`shoal cancel {self.job_id}`."
        )


class LifecycleConflict(RequestConflict):
    code: ClassVar[str] = "lifecycle_conflict"

    def __str__(self) -> str:
        return f"Job {self.job_id} is {self.state.value} and cannot {self.action}."


class TooManyViews(Conflict):
    code: ClassVar[str] = "too_many_views"

    def __init__(self, project: str, most: int) -> None:
        super().__init__(project, most)
        self.project = project
        self.most = most

    def __str__(self) -> str:
        return f"The project {self.project} has {self.most} views, as many as it may have: delete one first."


class QueueFull(Conflict):
    code: ClassVar[str] = "queue_full"

    def __init__(self, name: str, queued: int, max_queued: int, is_user: bool = False) -> None:
        super().__init__(name, queued, max_queued, is_user)
        self.name = name
        """Name of the project, or of the user."""
        self.queued = queued
        self.max_queued = max_queued
        self.is_user = is_user

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
    code: ClassVar[str] = "sweep_too_large"

    def __str__(self) -> str:
        whose, way = ("user", "set-user") if self.is_user else ("project", "set")
        return (
            f"No job of the sweep was submitted: with all of them, {whose} {self.name} would have more queued "
            f"jobs than its max_queued, which is {self.max_queued}. Leave values out of the grid, wait until others "
            f"have started, or raise the limit (`shoal quota {way} {self.name} --max-queued N`)."
        )


class SweepConflict(Conflict):
    code: ClassVar[str] = "sweep_conflict"

    def __init__(self, project: str, name: str, number: int, job_id: str) -> None:
        super().__init__(project, name, number, job_id)
        self.project = project
        self.name = name
        self.number = number
        self.job_id = job_id

    def __str__(self) -> str:
        return (
            f"Project {self.project} has a sweep {self.name!r} with another job number {self.number} ({self.job_id}). "
            "Use another name for the sweep, or repeat the request as it was."
        )


class ProjectConflict(Conflict):
    code: ClassVar[str] = "project_conflict"

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return f"Project {self.name} cannot be changed so: {self.why}."


class CheckpointConflict(Conflict):
    code: ClassVar[str] = "checkpoint_conflict"

    def __init__(self, job_id: str, name: str, state: str, rule: str) -> None:
        super().__init__(job_id, name, state, rule)
        self.job_id = job_id
        self.name = name
        self.state = state
        self.rule = rule
        """Which checkpoints can."""

    def __str__(self) -> str:
        return f"Checkpoint {self.name} of job {self.job_id} is {self.state}: {self.rule}."


class CheckpointKept(Conflict):
    code: ClassVar[str] = "checkpoint_kept"

    def __init__(self, job_id: str, name: str, why: str) -> None:
        super().__init__(job_id, name, why)
        self.job_id = job_id
        self.name = name
        self.why = why
        """Why, with the way out."""

    def __str__(self) -> str:
        return f"Checkpoint {self.name} of job {self.job_id} cannot be deleted: {self.why}."


class ProfileNotFound(NotFound):
    code: ClassVar[str] = "profile_not_found"

    def __init__(self, job_id: str, number: int) -> None:
        super().__init__(job_id, number)
        self.job_id = job_id
        self.number = number

    def __str__(self) -> str:
        return (
            f"Job {self.job_id} has no profile {self.number}; the newest ones are kept. `shoal profiles {self.job_id}` "
            f"lists them."
        )


class ProfileOpen(Conflict):
    code: ClassVar[str] = "profile_open"

    def __init__(self, job_id: str, number: int, rank: int) -> None:
        super().__init__(job_id, number, rank)
        self.job_id = job_id
        self.number = number
        self.rank = rank

    def __str__(self) -> str:
        return (
            f"Profile {self.number} of job {self.job_id} (rank {self.rank}) is being taken, and a job has one at a "
            f"time. Ask again once it has ended; `shoal profiles {self.job_id}` shows it."
        )


class PreconditionFailed(StoreError):
    code: ClassVar[str] = "precondition_failed"

    def __init__(self, job_id: str, current: str, given: str) -> None:
        super().__init__(job_id, current, given)
        self.job_id = job_id
        self.current = current
        self.given = given

    def __str__(self) -> str:
        return (
            f"Job {self.job_id} has changed: If-Match is {self.given[:80]}, the job's etag is {self.current}. "
            "Read the job again and repeat the change."
        )


class ClusterNotFound(NotFound):
    code: ClassVar[str] = "cluster_not_found"

    def __init__(self, cluster: str) -> None:
        super().__init__(cluster)
        self.cluster = cluster

    def __str__(self) -> str:
        return f"No cluster has joined as {self.cluster!r}. `shoal clusters` lists the clusters; `shoal join` adds one."


class ClusterConflict(Conflict):
    code: ClassVar[str] = "cluster_conflict"

    def __init__(self, cluster: str, why: str) -> None:
        super().__init__(cluster, why)
        self.cluster = cluster
        self.why = why
        """Why, with the way out."""

    def __str__(self) -> str:
        return f"Cluster {self.cluster} cannot be removed: {self.why}."


class MoveRefused(Conflict):
    code: ClassVar[str] = "move_refused"

    def __init__(self, job_id: str, to: str, why: str) -> None:
        super().__init__(job_id, to, why)
        self.job_id = job_id
        self.to = to
        self.why = why
        """Why, with the way out."""

    def __str__(self) -> str:
        return f"Job {self.job_id} cannot be moved to cluster {self.to}: {self.why}."


class GatewayRefused(Conflict):
    code: ClassVar[str] = "gateway_refused"

    def __init__(self, cluster: str, reason: str) -> None:
        super().__init__(cluster, reason)
        self.cluster = cluster
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class ClusterNameTaken(Conflict):
    code: ClassVar[str] = "cluster_name_taken"

    def __init__(self, cluster: str, reason: str) -> None:
        super().__init__(cluster, reason)
        self.cluster = cluster
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class AttemptTokenRefused(StoreError):
    code: ClassVar[str] = "attempt_token_refused"

    def __init__(self, job_id: str, attempt: int) -> None:
        super().__init__(job_id, attempt)
        self.job_id = job_id
        self.attempt = attempt

    def __str__(self) -> str:
        return f"Attempt {self.attempt} of job {self.job_id} is over, or has another token: this one ended with it."


class SupervisorReplaced(StoreError):
    code: ClassVar[str] = "supervisor_replaced"

    def __init__(self, life: int, current_life: int) -> None:
        super().__init__(life, current_life)
        self.life = life
        self.current_life = current_life

    def __str__(self) -> str:
        return f"Supervisor {self.life} of the attempt was replaced by supervisor {self.current_life}, and has to end."


class LeaseLost(StoreError):
    code: ClassVar[str] = "lease_lost"

    def __init__(self, epoch: int, current_epoch: int, owner: str) -> None:
        super().__init__(epoch, current_epoch, owner)
        self.epoch = epoch
        self.current_epoch = current_epoch
        self.owner = owner

    def __str__(self) -> str:
        return f"The lease of epoch {self.epoch} is lost: {self.owner!r} holds it with epoch {self.current_epoch}."


class BackupError(ValueError):
    """What keeps a backup from being made or restored, and the way out. Nothing was changed, unless the message says
    so."""

    code = "backup_failed"
