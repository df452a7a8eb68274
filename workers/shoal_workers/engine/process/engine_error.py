"""An exception that was raised outside every call into the task, as the report that users read. Called by the actor."""

from __future__ import annotations

import traceback

from shoal_workers.contract.exception_causes import REFUSED, Link, Origin, error_class_of
from shoal_workers.contract.messages import ErrorReport, Phase
from shoal_workers.contract.plain_text import text_of
from shoal_workers.engine.process.packages import PackagesNotInstalled
from shoal_workers.engine.process.secrets import SecretUnreadable


def engine_error(error: Exception, phase: Phase) -> ErrorReport:
    """An exception that was raised outside every call into the task. Torch may be what could not be imported."""
    number = error.errno if isinstance(error, OSError) else None
    is_users = isinstance(error, SecretUnreadable | PackagesNotInstalled)
    return ErrorReport(
        type=type(error).__name__,
        message=text_of(error) if is_users else f"the engine failed: {text_of(error)}",
        traceback=traceback.format_exc(),
        phase=phase,
        error_class=error_class_of([Link(type(error).__name__, text_of(error), number)]),
        origin=Origin.TASK if is_users else Origin.ENGINE,
        mistake=REFUSED if is_users else "",
    )
