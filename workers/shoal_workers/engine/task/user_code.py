"""Around every call into the task: its exceptions become a TaskFailed whose traceback begins in the user's code, and
whose report says what class of error it is, whose code raised it, and the line of the task. A common mistake has one
sentence instead of the framework's text (contract/errors/mistakes.py).

Never converts a broken collective: FSDP communicates inside the user's forward and backward passes, so a broken
connection is raised there as a RuntimeError that is not a bug of the task. Used by the engine, the passes and the
trainer.
"""

from __future__ import annotations

import dis
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from shoal_workers.contract.errors.classes import (
    ErrorClass,
    Frame,
    FrameOwner,
    Link,
    Origin,
    error_class_of,
    origin_of,
)
from shoal_workers.contract.errors.mistakes import REFUSED, Recognised, Seen, recognise
from shoal_workers.contract.messages import ErrorReport, Phase
from shoal_workers.engine.errors import EngineError, TaskFailed
from shoal_workers.engine.group.collective_errors import is_collective_error

_PACKAGE = Path(__file__).parent.parent.parent
_ENGINE = f"{_PACKAGE}{os.sep}"
_TASKS = f"{_PACKAGE / 'tasks'}{os.sep}"
"""The tasks that come with Shoal count as the user's code."""
_LIBRARIES = tuple(
    f"{path}{os.sep}"
    for path in {*site.getsitepackages(), *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))}
)
_DISTRIBUTED = f"{Path(torch.distributed.__file__).parent}{os.sep}"
_RAISE = dis.opmap["RAISE_VARARGS"]
_MAX_TRACEBACK_CHARS = 20_000
_MAX_MESSAGE_CHARS = 4_000


class UserCode:
    """Context manager, reusable: `with user_code: task.loss(...)`.

    Args:
        phase: called at the time of the error.
        place: the line of a member of the task, for errors without a line of the task on their stack.
    """

    def __init__(self, phase: Callable[[], Phase], place: Callable[[str], str] = lambda _: "") -> None:
        self._phase = phase
        self.place = place

    def __enter__(self) -> UserCode:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or not isinstance(error, (Exception, SystemExit)):
            return
        if isinstance(error, EngineError) or is_collective_error(error):
            return
        raise TaskFailed(report_of(error, self._phase(), in_task_call=True, place=self.place)) from None


def report_of(
    error: BaseException, phase: Phase, *, in_task_call: bool = False, place: Callable[[str], str] = lambda _: ""
) -> ErrorReport:
    """Flatten an exception for the wire, with its class and its origin, and without the engine's frames above the
    user's code. The message of a common mistake is its sentence, and its traceback has only the task's frames."""
    frames = _frames(error)
    error_class = error_class_of(_chain(error))
    is_refusal = frames[-1].is_refusal if frames else False
    found = _recognised(error, phase, frames) if in_task_call and error_class is ErrorClass.PLAIN else None
    origin = Origin.TASK if found else origin_of(frames, in_task_call=in_task_call)
    line = _line_of_task(error) if origin is Origin.TASK else ""
    if found is not None:
        line = line or place(found.member)
        message = f"{line}: {found.words}" if line else found.words
    else:
        message = str(error)[:_MAX_MESSAGE_CHARS]
    return ErrorReport(
        type=_type_of(error),
        message=message,
        traceback=_shown(error, origin, only_task=found is not None),
        phase=phase,
        error_class=error_class,
        origin=origin,
        mistake=found.name if found else REFUSED if is_refusal and origin is Origin.TASK else "",
        line="" if found or is_refusal else line,
    )


def _shown(error: BaseException, origin: Origin, *, only_task: bool) -> str:
    """The traceback: of a common mistake the frames of the task only, since the rest is torch's and Shoal's."""
    shown = traceback.TracebackException.from_exception(error)
    stack = shown.stack
    while origin is Origin.TASK and len(stack) > 1 and stack[0].filename.startswith(_ENGINE):
        del stack[0]
    if only_task:
        own = [frame for frame in stack if _owner(frame.filename) is FrameOwner.TASK]
        stack[:] = own or stack[-1:]
        shown.__cause__ = shown.__context__ = None
    text = "".join(shown.format())
    if len(text) > _MAX_TRACEBACK_CHARS:
        half = _MAX_TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text


def _recognised(error: BaseException, phase: Phase, frames: list[Frame]) -> Recognised | None:
    """None also for what Shoal itself has refused: its message says what is wrong."""
    if not frames or frames[-1].is_refusal:
        return None
    innermost = _tracebacks(error)[-1].tb_frame.f_code
    return recognise(
        [
            Seen(
                text=f"{_type_of(error)}: {str(error)[:_MAX_MESSAGE_CHARS]}",
                phase=phase,
                innermost=f"{innermost.co_filename}:{innermost.co_name}",
                is_in_engine=frames[-1].owner is FrameOwner.ENGINE,
            )
        ]
    )


def _line_of_task(error: BaseException) -> str:
    """`digits.py:41 in loss()`: the innermost line of the user's own code; empty: none is on the stack."""
    for step in reversed(_tracebacks(error)):
        code = step.tb_frame.f_code
        if _owner(code.co_filename) is FrameOwner.TASK and not code.co_filename.startswith(_TASKS):
            within = f" in {code.co_name}()" if code.co_name.isidentifier() else ""
            return f"{_relative(code.co_filename)}:{step.tb_lineno}{within}"
    return ""


def _relative(file: str) -> str:
    """To the entry of sys.path that it was imported from."""
    roots = [root.rstrip(os.sep) + os.sep for root in sys.path if len(root) > 1]
    return file.removeprefix(max((root for root in roots if file.startswith(root)), key=len, default=""))


def _tracebacks(error: BaseException) -> list[TracebackType]:
    """Outermost first."""
    found = []
    step = error.__traceback__
    while step is not None:
        found.append(step)
        step = step.tb_next
    return found


def _chain(error: BaseException) -> list[Link]:
    """The exception and what it was raised from, the newest first."""
    links: list[Link] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        number = link.errno if isinstance(link, OSError) else None
        links.append(Link(_type_of(link), str(link)[:_MAX_MESSAGE_CHARS], number))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


def _frames(error: BaseException) -> list[Frame]:
    """Outermost first."""
    frames = []
    for step in _tracebacks(error):
        code = step.tb_frame.f_code
        owner = _owner(code.co_filename)
        is_ours = owner is FrameOwner.ENGINE or code.co_filename.startswith(_TASKS)
        is_raise = code.co_code[step.tb_lasti] == _RAISE and not isinstance(error, AssertionError)
        frames.append(
            Frame(
                owner,
                is_communication=code.co_filename.startswith(_DISTRIBUTED),
                is_refusal=is_ours and is_raise and step.tb_next is None,
            )
        )
    return frames


def _owner(file: str) -> FrameOwner:
    if file.startswith(_TASKS):
        return FrameOwner.TASK
    if file.startswith(_ENGINE):
        return FrameOwner.ENGINE
    return FrameOwner.LIBRARY if file.startswith((*_LIBRARIES, "<frozen ")) else FrameOwner.TASK


def _type_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
