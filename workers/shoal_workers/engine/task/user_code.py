"""Around every call into the task: its exceptions become a TaskFailed whose traceback begins in the user's code, and
whose report says what class of error it is and whose code raised it.

Never converts a broken collective: FSDP communicates inside the user's forward and backward passes, so a broken
connection is raised there as a RuntimeError that is not a bug of the task. Used by the engine, the passes and the
trainer.
"""

from __future__ import annotations

import dis
import os
import site
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from shoal_workers.contract.errors.classes import Frame, FrameOwner, Link, Origin, error_class_of, origin_of
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
        raise TaskFailed(report_of(error, self._phase(), in_task_call=True)) from None


def report_of(error: BaseException, phase: Phase, *, in_task_call: bool = False) -> ErrorReport:
    """Flatten an exception for the wire, with its class and its origin, and without the engine's frames above the
    user's code."""
    shown = traceback.TracebackException.from_exception(error)
    stack = shown.stack
    origin = origin_of(_frames(error), in_task_call=in_task_call)
    while origin is Origin.TASK and len(stack) > 1 and stack[0].filename.startswith(_ENGINE):
        del stack[0]
    text = "".join(shown.format())
    if len(text) > _MAX_TRACEBACK_CHARS:
        half = _MAX_TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return ErrorReport(
        type=_type_of(error),
        message=str(error)[:_MAX_MESSAGE_CHARS],
        traceback=text,
        phase=phase,
        error_class=error_class_of(_chain(error)),
        origin=origin,
    )


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
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        name = code.co_filename
        is_raise = code.co_code[step.tb_lasti] == _RAISE and not isinstance(error, AssertionError)
        if name.startswith(_TASKS):
            frames.append(Frame(FrameOwner.TASK))
        elif name.startswith(_ENGINE):
            frames.append(Frame(FrameOwner.ENGINE, is_refusal=is_raise and step.tb_next is None))
        elif name.startswith(_LIBRARIES) or name.startswith("<frozen "):
            frames.append(Frame(FrameOwner.LIBRARY, is_communication=name.startswith(_DISTRIBUTED)))
        else:
            frames.append(Frame(FrameOwner.TASK))
        step = step.tb_next
    return frames


def _type_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
