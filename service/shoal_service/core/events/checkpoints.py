"""Durable checkpoints: committed, failed, damaged, deleted."""

from __future__ import annotations

from typing import ClassVar

from shoal_service.core.events.base import JobEvent, Severity
from shoal_service.core.quantities import duration_text


class CheckpointCommitted(JobEvent):
    """The commit marker of the checkpoint is in place."""

    type: ClassVar[str] = "checkpoint.committed"
    severity: ClassVar[Severity] = Severity.INFO

    name: str
    step: int
    generation: int

    def words(self) -> str:
        return f"checkpoint of step {self.step} committed"


class CheckpointFailed(JobEvent):
    """A part of a checkpoint, or its marker, could not be written; training goes on."""

    type: ClassVar[str] = "checkpoint.failed"
    severity: ClassVar[Severity] = Severity.ERROR

    message: str
    name: str | None = None
    generation: int | None = None
    rank: int | None = None
    step: int | None = None
    stalled: bool = False
    """The storage did not fail: it accepted nothing for `timeouts.save_s`."""

    def words(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}: "
        return f"a checkpoint could not be written: {rank}{self.message}"


class CheckpointRetried(JobEvent):
    """The state after the last step could not be saved; the group forms once more to save it."""

    type: ClassVar[str] = "checkpoint.retried"
    severity: ClassVar[Severity] = Severity.ERROR

    message: str
    number: int
    """Number of the try that follows."""
    of: int
    """Tries in all."""
    after_s: float
    """Seconds until that try."""

    def words(self) -> str:
        return (
            f"the final state could not be saved; try {self.number} of {self.of} follows in "
            f"{duration_text(self.after_s)}: {self.message}"
        )


class CheckpointDamaged(JobEvent):
    """A checkpoint failed its verification and is not used any more."""

    type: ClassVar[str] = "checkpoint.damaged"
    severity: ClassVar[Severity] = Severity.ERROR

    name: str
    message: str

    def words(self) -> str:
        return f"checkpoint {self.name} is damaged: {self.message}"


class StorageAway(JobEvent):
    """The checkpoint storage does not answer while an attempt looks for its newest checkpoint; it is asked again."""

    type: ClassVar[str] = "checkpoint.storage_away"
    severity: ClassVar[Severity] = Severity.WARNING

    message: str
    until: float
    """Wall-clock time at which the job fails; checkpoint.wait_s after the first request."""

    def words(self) -> str:
        return f"the checkpoint storage does not answer; it is asked again: {self.message}"


class CheckpointFallback(JobEvent):
    """After a damaged checkpoint, the newest one before it was chosen."""

    type: ClassVar[str] = "checkpoint.fallback"
    severity: ClassVar[Severity] = Severity.WARNING

    to: str | None
    """null: there is none, so training starts from the seed."""

    def words(self) -> str:
        return f"falling back to checkpoint {self.to}" if self.to else "no older checkpoint: training starts again"


class CheckpointRetentionFailed(JobEvent):
    """Old checkpoints could not be deleted."""

    type: ClassVar[str] = "checkpoint.retention_failed"
    severity: ClassVar[Severity] = Severity.WARNING

    message: str

    def words(self) -> str:
        return f"old checkpoints could not be deleted: {self.message}"


class CheckpointDeleted(JobEvent):
    """A user has deleted the checkpoint, or it was deleted long after the job's end. What the retention of a running
    job deletes (`checkpoint.keep`) is no event."""

    type: ClassVar[str] = "checkpoint.deleted"
    severity: ClassVar[Severity] = Severity.INFO

    name: str
    step: int
    reason: str = ""
    """Empty: a user asked for it."""

    def words(self) -> str:
        return f"checkpoint of step {self.step} deleted" + (f": {self.reason}" if self.reason else " on request")


class CheckpointPinned(JobEvent):
    """A user has pinned the checkpoint: retention does not delete it."""

    type: ClassVar[str] = "checkpoint.pinned"
    severity: ClassVar[Severity] = Severity.INFO

    name: str
    step: int

    def words(self) -> str:
        return f"checkpoint of step {self.step} pinned: retention does not delete it"


class CheckpointUnpinned(JobEvent):
    """A user has taken the pin of the checkpoint away: retention may delete it."""

    type: ClassVar[str] = "checkpoint.unpinned"
    severity: ClassVar[Severity] = Severity.INFO

    name: str
    step: int

    def words(self) -> str:
        return f"checkpoint of step {self.step} is no longer pinned: retention may delete it"
