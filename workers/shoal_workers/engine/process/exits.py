"""How a generation ended for this rank: from an exception to an ExitKind and its error report.

This is the only place that decides it, in order of precedence. A fenced generation is INTERRUPTED whatever was raised
last, because everything that breaks after the fence is a consequence of it. An exception of any other kind is a bug of
the engine, and is not classified. Called by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_workers.checkpoint.errors import DamagedCheckpoint, StateMismatch, StorageUnusable
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase
from shoal_workers.engine.errors import ComputesWrong, Fenced, FormFailed, NonFinite, StorageFailed, TaskFailed
from shoal_workers.engine.group.collective_errors import is_collective_error
from shoal_workers.engine.task.user_code import report_of
from shoal_workers.snapshot_store.errors import SnapshotLost


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """What is known when the training loop is left."""

    kind: ExitKind
    error: ErrorReport | None = None
    pending: CheckpointName | None = None
    """The checkpoint whose part must be durable before this rank may report FINISHED or YIELDED."""
    is_durable: bool = False
    """That part is durable."""

    @property
    def is_clean(self) -> bool:
        """All ranks left after the same collective."""
        return self.kind in (ExitKind.FINISHED, ExitKind.YIELDED, ExitKind.NON_FINITE)


def classify(error: BaseException, phase: Phase, *, is_fenced: bool, is_formed: bool) -> GenerationEnd | None:
    """The end that `error` means; None: the error is not an expected end and must be raised."""
    if is_fenced or isinstance(error, Fenced):
        return GenerationEnd(ExitKind.INTERRUPTED)
    kind = _kind(error, phase, is_formed=is_formed)
    if kind is None:
        return None
    return GenerationEnd(kind, error.report if isinstance(error, TaskFailed) else report_of(error, phase))


def _kind(error: BaseException, phase: Phase, *, is_formed: bool) -> ExitKind | None:
    match error:
        case TaskFailed() | StateMismatch():
            return ExitKind.USER_ERROR
        case FormFailed():
            return ExitKind.FORM_FAILED
        case NonFinite():
            return ExitKind.NON_FINITE
        case ComputesWrong():
            return ExitKind.COLLECTIVE_FAILED  # the error is another rank's
        case SnapshotLost():
            return ExitKind.SNAPSHOT_LOST
        case DamagedCheckpoint():
            return ExitKind.DAMAGED_CHECKPOINT
        case StorageFailed() | StorageUnusable():
            return ExitKind.STORAGE_FAILED
        case OSError() if phase in (Phase.RESTORING, Phase.SAVING):
            return ExitKind.STORAGE_FAILED
        case _ if is_collective_error(error):
            return ExitKind.COLLECTIVE_FAILED if is_formed else ExitKind.FORM_FAILED
        case _:
            return None
