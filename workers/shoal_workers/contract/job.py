"""States of a job, and the enums that belong to them. The values are the spelling on the wire and in metrics."""

from __future__ import annotations

from enum import StrEnum

from shoal_workers.contract.base import Frozen


class JobState(StrEnum):
    """QUEUED -> STARTING -> RUNNING <-> RECOVERING | RESIZING | WAITING | PAUSED -> SUCCEEDED | FAILED | CANCELLED."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    RESIZING = "RESIZING"
    WAITING = "WAITING"
    """Fewer than elasticity.min_workers workers are alive. Resumes when there are enough; fails at its deadline."""
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def holds_workers(self) -> bool:
        """The job should have a supervisor."""
        return not self.ended and self not in (JobState.QUEUED, JobState.PAUSED)


class EndReason(StrEnum):
    """Why an attempt ended; the job may have ended with it."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    USER_ERROR = "user_error"
    NON_FINITE = "non_finite"
    CAPACITY_TIMEOUT = "capacity_timeout"
    RECOVERY_BUDGET = "recovery_budget"
    STORAGE_FAILED = "storage_failed"
    START_FAILED = "start_failed"
    CLUSTER_LOST = "cluster_lost"
    SUPERVISOR_LOST = "supervisor_lost"
    INTERNAL = "internal"


class IncidentCause(StrEnum):
    """What happened to a worker or a group."""

    WORKER_DIED = "worker_died"
    NODE_DIED = "node_died"
    STUCK = "stuck"
    """A surviving rank did not leave its collective within its deadline, and was replaced."""
    HUNG = "hung"
    """No rank made progress for longer than health.hang_factor and health.hang_floor_s allow."""
    UNREACHABLE = "unreachable"
    """The worker or its node does not answer, and its group broke."""
    PREEMPTED = "preempted"
    """The node was drained or preempted, and went away before the group had switched to other workers."""
    STRAGGLER = "straggler"
    CORRUPTED = "corrupted"
    """A worker computes wrong results: its replay of a micro-batch differs from those of two others."""
    NON_FINITE = "non_finite"
    COLLECTIVE_FAILED = "collective_failed"
    FORM_FAILED = "form_failed"
    SNAPSHOT_LOST = "snapshot_lost"
    DAMAGED_CHECKPOINT = "damaged_checkpoint"


class StateSource(StrEnum):
    """Where a group takes its state from."""

    MEMORY = "memory"
    """Snapshots in the memory of the job's nodes."""
    CHECKPOINT = "checkpoint"
    """The newest durable checkpoint."""
    INITIAL = "initial"
    """The seed: there is no checkpoint yet."""


class UserFailure(Frozen):
    """An exception of the user's code, with all ranks that raised it."""

    type: str
    message: str
    traceback: str
    phase: str
    ranks: tuple[int, ...]
    step: int
