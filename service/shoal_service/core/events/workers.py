"""Single workers: started, lost, slow, about to leave, released."""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity
from shoal_service.core.quantities import duration_text
from shoal_workers.contract.job import IncidentCause


class WorkerStarted(JobEvent):
    """A worker has loaded the task and is warm."""

    type: ClassVar[str] = "worker.started"
    severity: ClassVar[Severity] = Severity.INFO

    worker_id: str
    node_id: str
    node_ip: str
    pid: int

    def words(self) -> str:
        return f"{worker_text(self.worker_id)} started (pid {self.pid})"


class WorkerStartFailed(JobEvent):
    """A new worker could not load the task; the running group goes on without it."""

    type: ClassVar[str] = "worker.start_failed"
    severity: ClassVar[Severity] = Severity.WARNING

    worker_id: str
    error: str

    def words(self) -> str:
        return f"{worker_text(self.worker_id)} could not load the task: {self.error}"


class WorkerLost(JobEvent):
    """A worker died or was evicted."""

    type: ClassVar[str] = "worker.lost"
    severity: ClassVar[Severity] = Severity.ERROR

    worker_id: str
    rank: int | None
    """null: it was not in the group."""
    cause: IncidentCause
    message: str

    def words(self) -> str:
        message = f", {self.message}" if self.message else ""
        return f"{worker_text(self.worker_id, self.rank)} lost: {self.cause}{message}"


class StragglerFound(JobEvent):
    """A worker computed longer than `health.straggler_factor` times the others' median for `health.straggler_steps`
    steps in a row."""

    type: ClassVar[str] = "worker.straggler"
    severity: ClassVar[Severity] = Severity.WARNING

    worker_id: str
    rank: int
    node_id: str
    compute_s: float
    """Seconds that it computed in its last step."""
    median_s: float
    """Median of the others in that step."""
    step: int
    action: str

    def words(self) -> str:
        own, others = duration_text(self.compute_s), duration_text(self.median_s)
        name = worker_text(self.worker_id, self.rank)
        return f"{name} is slow: {own} per step, the others {others}; {self.action}"


class StragglerKept(JobEvent):
    """No other worker became warm in time to replace a slow one, so it stays."""

    type: ClassVar[str] = "worker.straggler_kept"
    severity: ClassVar[Severity] = Severity.WARNING

    worker_id: str
    rank: int | None
    message: str

    def words(self) -> str:
        return f"{worker_text(self.worker_id, self.rank)} is slow but stays: {self.message}"


class WorkerLeaving(JobEvent):
    """A worker received SIGTERM or a preemption notice and will be gone soon."""

    type: ClassVar[str] = "worker.leaving"
    severity: ClassVar[Severity] = Severity.WARNING

    worker_id: str
    rank: int | None
    """null: it is not in the group."""
    reason: str
    grace_s: float
    """Seconds until it is gone."""

    def words(self) -> str:
        name = worker_text(self.worker_id, self.rank)
        return f"{name} will be gone in {duration_text(self.grace_s)}: {self.reason}"


class WorkerReleased(JobEvent):
    """Shoal ended a worker that it does not need, or that has to leave."""

    type: ClassVar[str] = "worker.released"
    severity: ClassVar[Severity] = Severity.INFO

    worker_id: str
    reason: str

    def words(self) -> str:
        return f"{worker_text(self.worker_id)} released: {self.reason}"


def worker_text(worker_id: str, rank: int | None = None) -> str:
    """`worker 3 (rank 1)`: the last part of the worker's id is its number in the attempt."""
    name = f"worker {worker_id.rpartition('/')[2]}"
    return name if rank is None else f"{name} (rank {rank})"
