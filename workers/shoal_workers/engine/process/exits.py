"""How a generation ended for this rank: from an exception to an ExitKind and its error report.

This is the only place that decides it, in order of precedence. A fenced generation is INTERRUPTED whatever was raised
last, because everything that breaks after the fence is a consequence of it. An error of the device, of memory or of the
system is a WORKER_FAULT in any code; the supervisor, which sees all ranks, decides who is to blame.
Any other exception is the task's or the engine's, by the frames of its traceback. Called by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_workers.checkpoint.errors import DamagedCheckpoint, InitialWeightsUnusable, StateMismatch, StorageUnusable
from shoal_workers.contract.exception_causes import REFUSED, ErrorClass, Origin
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase
from shoal_workers.contract.suspects import Suspect
from shoal_workers.contract.worker_reports import SavedPart
from shoal_workers.engine.generation_ends import (
    ComputesWrong,
    DataDiffers,
    Fenced,
    FormFailed,
    GroupBroken,
    LayoutRefused,
    NonFinite,
    StorageFailed,
    TaskFailed,
)
from shoal_workers.engine.group.collectives import is_collective_error
from shoal_workers.engine.task.user_code import make_error_report
from shoal_workers.snapshot_store.snapshot_errors import SnapshotLost

_SAVING = (Phase.SAVING, Phase.COMMITTING)


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """What is known when the training loop is left."""

    kind: ExitKind
    error: ErrorReport | None = None
    pending: CheckpointName | None = None
    """The checkpoint whose part must be durable before this rank may report FINISHED or YIELDED."""
    saved_part: SavedPart | None = None
    """The part, once it is durable."""
    suspect: Suspect | None = None

    @property
    def is_clean(self) -> bool:
        """True if all ranks left after the same collective."""
        return self.kind in (ExitKind.FINISHED, ExitKind.YIELDED, ExitKind.NON_FINITE)


def classify(error: BaseException, phase: Phase, *, is_fenced: bool, is_formed: bool) -> GenerationEnd | None:
    """The end that `error` means; None if it is not an error, and must be raised."""
    if is_fenced or isinstance(error, Fenced):
        return GenerationEnd(ExitKind.INTERRUPTED)
    if isinstance(error, GroupBroken):
        return GenerationEnd(ExitKind.COLLECTIVE_FAILED, make_error_report(error, phase))
    if not isinstance(error, Exception):
        return None  # KeyboardInterrupt, SystemExit: not an error of training
    report = error.report if isinstance(error, TaskFailed) else make_error_report(error, phase)
    if isinstance(error, (StateMismatch, DataDiffers, NonFinite)):
        report = report.model_copy(update={"mistake": REFUSED})
    if isinstance(error, LayoutRefused):
        report = error.report(phase)
    suspect = error.suspect if isinstance(error, NonFinite) else None
    return GenerationEnd(_kind(error, report, phase, is_formed=is_formed), report, suspect=suspect)


def _kind(error: Exception, report: ErrorReport, phase: Phase, *, is_formed: bool) -> ExitKind:
    match error:
        case StateMismatch() | InitialWeightsUnusable() | DataDiffers() | LayoutRefused():
            return ExitKind.USER_ERROR
        case TaskFailed():
            is_storage = report.error_class is ErrorClass.SYSTEM and report.origin is Origin.ENGINE
            return (
                ExitKind.STORAGE_FAILED
                if is_storage and phase in (Phase.SAVING, Phase.COMMITTING)
                else _kind_of_class(report)
            )
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
        case OSError() if phase in (Phase.RESTORING, *_SAVING):
            return ExitKind.STORAGE_FAILED
        case _ if is_collective_error(error) and report.error_class is ErrorClass.PLAIN:
            return ExitKind.COLLECTIVE_FAILED if is_formed else ExitKind.FORM_FAILED
        case _:
            return _kind_of_class(report)


def _kind_of_class(report: ErrorReport) -> ExitKind:
    if report.error_class is not ErrorClass.PLAIN:
        return ExitKind.WORKER_FAULT
    return ExitKind.ENGINE_ERROR if report.origin is Origin.ENGINE else ExitKind.USER_ERROR
