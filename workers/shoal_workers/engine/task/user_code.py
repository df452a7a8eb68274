"""Surrounds every call into the task: what it raises becomes a report of whose error it is, and what it leaves changed
is refused or undone.

Exceptions become a TaskFailed whose traceback begins in the user's code, and whose report says what class of error it
is, whose code raised it, and the line of the task. A common mistake has one sentence instead of the framework's text
(contract/exception_causes.py). Settings of the process, or of the training thread:

    gradient and inference mode,    refused: Shoal's own tensors, and every later call, would be computed otherwise than
    default device, autocast        the task's author saw
    default dtype                   accepted from the import to the last `build_dataset`, so that all later calls have
                                    it, in every worker; refused later, since ranks and steps would differ
    number of threads, anomaly      undone after each call, with a remark in the log, once: the spec decides, or the
    detection, deterministic mode   setting counts in the call that makes it

Everything else is the task's own business: seeds (each micro-batch is seeded anew), the working directory (Shoal's
paths are absolute), TF32, cuDNN's benchmark. Never converts a broken collective: FSDP communicates inside the user's
forward and backward passes, so a broken connection is raised there as a RuntimeError that is not a bug of the task.
Used by the engine, the passes and the trainer.
"""

from __future__ import annotations

import dis
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shoal_workers.contract.exception_causes import (
    REFUSED,
    ErrorClass,
    Frame,
    FrameOwner,
    Link,
    Origin,
    Recognised,
    Seen,
    error_class_of,
    origin_of,
    recognise,
)
from shoal_workers.contract.messages import ErrorReport, Phase
from shoal_workers.contract.plain_text import text_of
from shoal_workers.engine.generation_ends import EngineError, Fenced, TaskFailed
from shoal_workers.engine.group.collectives import is_collective_error
from shoal_workers.engine.task.code_owner import ENGINE, TASKS, line_in, owner_of
from shoal_workers.engine.task.task_collectives import enter_task, leave_task
from shoal_workers.torch_internals import default_device, enter_inference_mode

_DISTRIBUTED = f"{Path(torch.distributed.__file__).parent}{os.sep}"
_RAISE = dis.opmap["RAISE_VARARGS"]
_MAX_TRACEBACK_CHARS = 20_000
_MAX_MESSAGE_CHARS = 4_000


_MEMBERS = {Phase.PREPARING: "__init__", Phase.BUILDING: "build_model", Phase.OPTIMIZER: "build_optimizer"}


class SettingLeft(Exception):
    """The task has left a setting of the process changed. The message is for the user."""


class UserCode:
    """Context manager, reusable: `with user_code: task.loss(...)`.

    It also refuses what the task's code may not do to the process: collectives of its own (task_collectives.py), and
    settings that it leaves changed.

    Args:
        phase: called at the time of the error.
        place: the line of a member of the task, for errors without a line of the task on their stack.
        remark: called with sentences for the job's log.
    """

    def __init__(
        self,
        phase: Callable[[], Phase],
        place: Callable[[str], str] = lambda _: "",
        remark: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._phase = phase
        self.place = place
        self._remark = remark
        self._settings: list[ProcessSettings] = []

    def __enter__(self) -> UserCode:
        self._settings.append(ProcessSettings())
        enter_task(self._phase, self._remark)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        refused = leave_task()
        left, remarks = self._settings.pop().left_by(self._phase())
        for text in remarks:
            self._remark(text)
        if refused is not None and not isinstance(error, Fenced):
            raise self._failed(refused) from None
        if error is not None and not is_of_task(error):
            return
        if error is not None and (isinstance(error, EngineError) or is_collective_error(error)):
            return
        if left:
            try:
                raise SettingLeft(self._describe(left))
            except SettingLeft as setting:
                raise self._failed(setting) from None
        if error is not None:
            raise self._failed(error) from None

    def _failed(self, error: BaseException) -> TaskFailed:
        return TaskFailed(make_error_report(error, self._phase(), in_task_call=True, place=self.place))

    def _describe(self, left: str) -> str:
        phase = self._phase()
        where = self.place(_MEMBERS.get(phase, "loss")) or "the task"
        if phase is Phase.PREPARING:
            where += ", or where the module is imported or its data are opened"
        return f"{where}: {left}"


def is_of_task(error: BaseException) -> bool:
    """True if the user's code may have raised it. Of what `except Exception` does not catch, Shoal's own exceptions are
    none of it, nor is Ctrl-C, which reaches the main thread only."""
    if isinstance(error, (Exception, SystemExit)):
        return True
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is not threading.main_thread()
    return not type(error).__module__.startswith("shoal_workers.")


def make_error_report(
    error: BaseException, phase: Phase, *, in_task_call: bool = False, place: Callable[[str], str] = lambda _: ""
) -> ErrorReport:
    """Flatten an exception for the wire, with its class and its origin, and without the engine's frames above the
    user's code. The message of a common mistake is its sentence, and its traceback has only the task's frames."""
    frames = _frames(error)
    error_class = error_class_of(_chain(error))
    is_refusal = frames[-1].is_refusal if frames else False
    recognised = _recognised(error, phase, frames) if in_task_call and error_class is ErrorClass.PLAIN else None
    origin = Origin.TASK if recognised else origin_of(frames, in_task_call=in_task_call)
    line = _line_of_task(error) if origin is Origin.TASK else ""
    if recognised is not None:
        line = line or place(recognised.member)
        message = f"{line}: {recognised.words}" if line else recognised.words
    else:
        message = text_of(error)[:_MAX_MESSAGE_CHARS]
    return ErrorReport(
        type=_type_of(error),
        message=message,
        traceback=_shown(error, origin, only_task=recognised is not None),
        phase=phase,
        error_class=error_class,
        origin=origin,
        mistake=recognised.name if recognised else REFUSED if is_refusal and origin is Origin.TASK else "",
        line="" if recognised or is_refusal else line,
    )


def _shown(error: BaseException, origin: Origin, *, only_task: bool) -> str:
    """The traceback: of a common mistake the frames of the task only, since the rest is torch's and Shoal's."""
    shown = traceback.TracebackException.from_exception(error)
    stack = shown.stack
    while origin is Origin.TASK and len(stack) > 1 and stack[0].filename.startswith(ENGINE):
        del stack[0]
    if only_task:
        task_frames = [frame for frame in stack if owner_of(frame.filename) is FrameOwner.TASK]
        stack[:] = task_frames or stack[-1:]
        shown.__cause__ = shown.__context__ = None
    text = "".join(shown.format())
    if len(text) > _MAX_TRACEBACK_CHARS:
        half = _MAX_TRACEBACK_CHARS // 2
        text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return text


def _recognised(error: BaseException, phase: Phase, frames: list[Frame]) -> Recognised | None:
    """Returns None also for what Shoal itself has refused: its message says what is wrong."""
    if not frames or frames[-1].is_refusal:
        return None
    innermost = _tracebacks(error)[-1].tb_frame.f_code
    return recognise(
        [
            Seen(
                text=f"{_type_of(error)}: {text_of(error)[:_MAX_MESSAGE_CHARS]}",
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
        if owner_of(code.co_filename) is FrameOwner.TASK and not code.co_filename.startswith(TASKS):
            return line_in(code.co_filename, step.tb_lineno, code.co_name)
    return ""


def _tracebacks(error: BaseException) -> list[TracebackType]:
    """Outermost first."""
    tracebacks = []
    step = error.__traceback__
    while step is not None:
        tracebacks.append(step)
        step = step.tb_next
    return tracebacks


def _chain(error: BaseException) -> list[Link]:
    """The exception and what it was raised from, the newest first."""
    links: list[Link] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        number = link.errno if isinstance(link, OSError) else None
        links.append(Link(_type_of(link), text_of(link)[:_MAX_MESSAGE_CHARS], number))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


def _frames(error: BaseException) -> list[Frame]:
    """Outermost first."""
    frames = []
    for step in _tracebacks(error):
        code = step.tb_frame.f_code
        owner = owner_of(code.co_filename)
        is_ours = owner is FrameOwner.ENGINE or code.co_filename.startswith(TASKS)
        is_raise = code.co_code[step.tb_lasti] == _RAISE and not isinstance(error, AssertionError)
        frames.append(
            Frame(
                owner,
                is_communication=code.co_filename.startswith(_DISTRIBUTED),
                is_refusal=is_ours and is_raise and step.tb_next is None,
            )
        )
    return frames


def _type_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_AUTOCAST_DEVICES = ("cpu", "cuda")
_entered: list[object] = []
"""Modes that are ended when they are freed."""


def _set_autocast(are_enabled: tuple[bool, ...]) -> None:
    for device, is_enabled in zip(_AUTOCAST_DEVICES, are_enabled, strict=True):
        torch.set_autocast_enabled(device, is_enabled)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "inference": (torch.is_inference_mode_enabled, lambda is_on: _entered.append(enter_inference_mode(is_on=is_on))),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "device": (default_device, torch.set_default_device),
    "autocast": (lambda: tuple(map(torch.is_autocast_enabled, _AUTOCAST_DEVICES)), _set_autocast),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "anomaly": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    ),
}
"""How each setting is read and written. In the order in which they are written: inference mode also changes whether
gradients are on."""
_REFUSALS = {
    "inference": "inference mode was left on; write `with torch.inference_mode():` around what needs it.",
    "gradients": "gradients were switched and left so (torch.set_grad_enabled({})); write `with torch.no_grad():` "
    "around what needs none. Shoal itself validates without gradients.",
    "device": "the default device was left at {} (torch.set_default_device); leave it: build_model() builds on the CPU "
    "and Shoal moves model and batches, and new tensors take device=batch.device.",
    "autocast": "autocast was left on (torch.set_autocast_enabled); set precision: bf16 in the spec, or write "
    "`with torch.autocast(...):` around what needs it.",
    "dtype": "the default dtype was left at {} (torch.set_default_dtype), which only calls after this one would have; "
    "set it where the module is imported, or give tensors and modules a dtype=.",
}
_UNDONE = {
    "threads": "torch.set_num_threads(), which was undone: worker.cpus decides how many threads a worker has.",
    "anomaly": "torch.autograd.set_detect_anomaly(), which was undone: called within loss(), it counts for the "
    "backward pass of that micro-batch.",
    "deterministic": "torch.use_deterministic_algorithms(), which was undone: deterministic: true in the spec asks "
    "for equal bits.",
}


class ProcessSettings:
    """The settings that a task may leave changed in this process, as they are when this is made. Read before and after
    each call into the task, which takes microseconds."""

    def __init__(self) -> None:
        self._values = {name: read() for name, (read, _) in _SETTINGS.items()}

    def left_by(self, phase: Phase) -> tuple[str, list[str]]:
        """What a call that began with these settings has left: why that is refused (empty: it is not), and the remarks
        on what was undone. Afterwards all are as they were, but for what is accepted."""
        now = {name: read() for name, (read, _) in _SETTINGS.items()}
        changed = [name for name, value in now.items() if value != self._values[name]]
        if not changed:
            return "", []
        refused = [_REFUSALS[name].format(now[name]) for name in changed if _is_refused(name, now[name], phase)]
        for name, (read, write) in _SETTINGS.items():
            is_accepted = name == "dtype" and not refused
            if not is_accepted and read() != self._values[name]:
                write(self._values[name])
        return next(iter(refused), ""), [f"The task calls {_UNDONE[name]}" for name in changed if name in _UNDONE]


def _is_refused(name: str, value: Any, phase: Phase) -> bool:
    if name == "device" and value == torch.device("cpu"):
        return False
    return name in _REFUSALS and not (name == "dtype" and phase is Phase.PREPARING)


class Remarks:
    """Sentences about a task for the job's log: each once per worker, and only on rank 0. Training thread only."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: list[str] = []
        """While a worker prepares it has no rank, so what is remarked then waits for its first generation."""

    def add(self, text: str) -> None:
        if text not in self._known:
            self._known.add(text)
            self._waiting.append(text)

    def say(self, rank: int, log: Callable[[str], None]) -> None:
        """Log what was added since the last call, if this is rank 0."""
        waiting, self._waiting = self._waiting, []
        if rank == 0:
            for text in waiting:
                log(text)
