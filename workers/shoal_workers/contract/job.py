"""States of a job, and the enums that belong to them. The values are the spelling on the wire and in metrics."""

from __future__ import annotations

from enum import StrEnum

from shoal_workers.contract.plain_text import OfTask


class JobState(StrEnum):
    """QUEUED -> STARTING -> RUNNING <-> RECOVERING | RESIZING | WAITING | PAUSED -> SUCCEEDED | FAILED | CANCELLED."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    """An attempt has begun, and its first group has not formed yet."""
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    """The group was lost, and the attempt re-forms it."""
    RESIZING = "RESIZING"
    """The group switches on purpose, for example to another number of workers."""
    WAITING = "WAITING"
    """Fewer than elasticity.min_workers workers are alive. Resumes when there are enough; fails at its deadline."""
    PAUSING = "PAUSING"
    """The attempt saves its state and ends, for example because the user asked for a pause."""
    PAUSED = "PAUSED"
    """No attempt runs. When the job is resumed, it continues from its checkpoint."""
    CANCELLING = "CANCELLING"
    """A cancel was requested, and the attempt is ending."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def holds_workers(self) -> bool:
        """True if the job should have a supervisor."""
        return not self.ended and self not in (JobState.QUEUED, JobState.PAUSED)


class EndReason(StrEnum):
    """Why an attempt ended; the job may have ended with it. `shoal_service.core.endings` has the words for each."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    USER_ERROR = "user_error"
    NON_FINITE = "non_finite"
    CAPACITY_TIMEOUT = "capacity_timeout"
    RECOVERY_BUDGET = "recovery_budget"
    STORAGE_FAILED = "storage_failed"
    CHECKPOINTS_MISSING = "checkpoints_missing"
    """The storage answers, and has neither the newest committed checkpoint of the job nor a newer one."""
    VALIDATION_FAILED = "validation_failed"
    """All steps are done and the last checkpoint is committed, but the final validation kept losing its workers."""
    DAMAGED_CHECKPOINT = "damaged_checkpoint"
    START_FAILED = "start_failed"
    WORKERS_FAILED = "workers_failed"
    SERVER_STOPPED = "server_stopped"
    PREEMPTED = "preempted"
    """Another job got the workers; the attempt saved its state before."""
    MOVED = "moved"
    """The job goes on in another cluster; the attempt saved its state before."""
    CLUSTER_LOST = "cluster_lost"
    SUPERVISOR_LOST = "supervisor_lost"
    INTERNAL = "internal"


class IncidentCause(StrEnum):
    """What happened to a worker or a group."""

    WORKER_DIED = "worker_died"
    WORKER_FAULT = "worker_fault"
    """The device, the memory or the operating system failed on a worker, and not on all; its exception tells which."""
    ENGINE_ERROR = "engine_error"
    """The engine's own code raised on a worker, and not on all."""
    NODE_DIED = "node_died"
    STUCK = "stuck"
    """A surviving rank did not leave its collective within its deadline, and was replaced."""
    HUNG = "hung"
    """No rank made progress for longer than health.hang_factor and health.hang_floor_s allow."""
    UNREACHABLE = "unreachable"
    """The worker or its node does not answer, and its group broke."""
    NODE_UNREACHABLE = "node_unreachable"
    """The node answers no connect. Its workers are left out of the group until it does; nothing is ended."""
    PREEMPTED = "preempted"
    """The node was drained or preempted, and went away before the group had switched to other workers."""
    STRAGGLER = "straggler"
    CORRUPTED = "corrupted"
    """A worker computes wrong results (its replay of a micro-batch differs from those of two others), or its parameters
    differ from those of the other replicas."""
    NON_FINITE = "non_finite"
    COLLECTIVE_FAILED = "collective_failed"
    SCRIPT_DIED = "script_died"
    """A process of the script was killed by a signal, and its worker lives on."""
    FORM_FAILED = "form_failed"
    SNAPSHOT_LOST = "snapshot_lost"
    DAMAGED_CHECKPOINT = "damaged_checkpoint"
    CLUSTER_LOST = "cluster_lost"
    """The previous attempt was lost with all its workers and its supervisor."""
    RETRIED = "retried"
    """The previous attempt has failed, and the job was retried."""


class StateSource(StrEnum):
    """Where a group takes its state from."""

    MEMORY = "memory"
    """Snapshots in the memory of the job's nodes."""
    CHECKPOINT = "checkpoint"
    """The newest durable checkpoint."""
    INITIAL = "initial"
    """The initial weights: there is no checkpoint yet."""


class RaisedError(OfTask):
    """An exception, flattened for the wire."""

    type: str
    message: str
    traceback: str
    mistake: str = ""
    """Name of a common mistake (docs/tasks.md), or "refused" if Shoal itself refuses something of the task: then the
    message is a whole sentence for the user. Else empty."""
    line: str = ""
    """The innermost line of the task's code, `digits.py:41 in loss()`, unless the message names it."""

    @property
    def sentence(self) -> str:
        """What a user reads in one line: with the type and the line, unless the message is a whole sentence."""
        if self.mistake:
            return self.message
        return ": ".join(filter(None, (self.type, self.message))) + (f" ({self.line})" if self.line else "")


class UserFailure(RaisedError):
    """The exception that ended the attempt, with all ranks that raised it. It is of the user's code if the reason is
    user_error."""

    phase: str
    ranks: tuple[int, ...]
    step: int
