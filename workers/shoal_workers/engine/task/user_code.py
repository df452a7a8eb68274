"""Around every call into the task: its exceptions become a TaskFailed whose traceback begins in the user's code.

Never converts a broken collective: FSDP communicates inside the user's forward and backward passes, so a broken
connection is raised there as a RuntimeError that is not a bug of the task. Used by the engine, the passes and the
trainer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from shoal_workers.contract.messages import ErrorReport, Phase
from shoal_workers.engine.errors import EngineError, TaskFailed
from shoal_workers.engine.group.collective_errors import is_collective_error

_ENGINE = str(Path(__file__).parent.parent)
_MAX_TRACEBACK_CHARS = 20_000
_MAX_MESSAGE_CHARS = 4_000


class UserCode:
    """Context manager, reusable: `with user_code: task.loss(...)`.

    Args:
        phase: called at the time of the error.
    """

    def __init__(self, phase: Callable[[], Phase]) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or not isinstance(error, (Exception, SystemExit)):
            return
        if isinstance(error, EngineError) or is_collective_error(error):
            return
        raise TaskFailed(report_of(error, self._phase())) from None


def report_of(error: BaseException, phase: Phase) -> ErrorReport:
    """Flatten an exception for the wire, without the engine's frames above the user's code."""
    shown = traceback.TracebackException.from_exception(error)
    stack = shown.stack
    while len(stack) > 1 and stack[0].filename.startswith(_ENGINE):
        del stack[0]
    text = "".join(shown.format())
    if len(text) > _MAX_TRACEBACK_CHARS:
        half = _MAX_TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ErrorReport(type=name, message=str(error)[:_MAX_MESSAGE_CHARS], traceback=text, phase=phase)
