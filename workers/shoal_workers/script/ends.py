"""How a script has ended, from the status of its process to an ExitKind and its error report. Pure.

    what was ordered   interrupt: INTERRUPTED, yield: YIELDED; whatever the status: the signals were the runner's
    an exception       COLLECTIVE_FAILED if another rank or the network broke a collective; WORKER_FAULT if the device,
                       memory or the operating system failed; else USER_ERROR. It counts whatever the status is
    exit status 0      FINISHED
    another status     USER_ERROR, also if threads of the process went on until it was killed
    a signal           SCRIPT_DIED if it comes from outside; COLLECTIVE_FAILED if NCCL or gloo has aborted the process
                       for a broken collective; else USER_ERROR: the process itself has caused it (a crash, or tensors
                       of other sizes than those of the other ranks)

Called by the runner.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal_workers.contract import (
    ErrorClass,
    ErrorReport,
    ExitKind,
    FrameOwner,
    Phase,
    error_class_of,
    is_broken_collective,
    is_collective_abort,
    unequal_sizes,
)
from shoal_workers.contract.exception_causes import Link
from shoal_workers.engine.task.code_owner import line_in, owner_of
from shoal_workers.exit_status import ExitStatus

EXIT_STATUS, CRASH = "exit_status", "crash"
"""Names of mistakes whose messages are whole sentences about the process."""
_CRASHES = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
"""Signals that a process causes itself."""
_DIST_ERROR, _RUNTIME_ERROR = "DistError", "builtins.RuntimeError"
_MAX_MESSAGE_CHARS = 4_000
_FRAME = re.compile(r'^  File "(.+?)", line (\d+),? in (.+)$', re.MULTILINE)
"""A line of a stack, as faulthandler or an exception prints it."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a script's process has ended: one of `code` and `signal` is set."""

    code: int | None = None
    signal: int | None = None
    raised: dict[str, Any] | None = None
    """The exception that ended it, as `program.described` says it, or SystemExit; None if none did."""
    recorded: dict[str, Any] | None = None
    """What the script has written into TORCHELASTIC_ERROR_FILE."""
    printed: str = ""
    """If it crashed: the end of its standard error."""

    def words(self) -> str:
        """`exited with 3`, `was killed by signal 9 (SIGKILL)`."""
        return ExitStatus(self.code, self.signal).words()


def end_of(ended: Ended, script: str, folder: str) -> tuple[ExitKind, ErrorReport | None]:
    """Return the end of a script that was not ordered.

    Args:
        script: its name, as users know it.
        folder: its working directory, to which the lines of its code are relative.
    """
    if ended.raised is not None and "text" not in ended.raised:
        return _of_exception(ended.raised, folder)
    code = ended.code if ended.raised is None else ended.raised["status"]
    if code is None:
        return _of_signal(ended, script, folder)
    if code == 0:
        return ExitKind.FINISHED, None
    message, line = _recorded(ended.recorded, folder)
    if not message and ended.raised is not None:
        message, line = ended.raised["text"], _line(ended.raised["frames"], folder)
    place = f" at {line}" if line else ""
    reason = f": {message}" if message else ", and its log says why."
    message = f"{script} ended with exit status {code}{place}{reason}"
    return ExitKind.USER_ERROR, _sentence("ExitStatus", message, EXIT_STATUS)


def killed(ended: Ended, script: str, *, out_of_memory: bool) -> ErrorReport:
    """Return the report about a process that was killed by a signal other than that of a crash. Who has sent it is not
    known.

    Args:
        out_of_memory: the kernel has killed a process for lack of memory meanwhile.
    """
    status = ExitStatus(signal=ended.signal, out_of_memory=out_of_memory and ended.signal == signal.SIGKILL)
    kind = "OutOfMemory" if status.out_of_memory else f"Signal{ended.signal}"
    return _sentence(kind, f"the process of {script} {status.words()}", EXIT_STATUS)


def _of_signal(ended: Ended, script: str, folder: str) -> tuple[ExitKind, ErrorReport | None]:
    if ended.signal not in _CRASHES:
        return ExitKind.SCRIPT_DIED, None
    line = _line_of_stack(ended.printed, folder)
    place = f" at {line}" if line else ""
    if (sizes := unequal_sizes(ended.printed)) is not None:
        message = (
            f"a collective of {script}{place} has received {sizes[0]} bytes and expects {sizes[1]}: the ranks have "
            "called it with tensors of different sizes, or have called different collectives."
        )
        return ExitKind.USER_ERROR, _sentence("UnequalSizes", message, CRASH)
    if is_collective_abort(ended.printed):
        message = f"a collective of {script} was broken{place}, and its process {ended.words()}."
        return ExitKind.COLLECTIVE_FAILED, _sentence("Abort", message, CRASH)
    message = f"{script} crashed{place}: its process {ended.words()}. Its log has the stack of the crash."
    return ExitKind.USER_ERROR, _sentence("Crash", message, CRASH)


def _recorded(file: Any, folder: str) -> tuple[str, str]:
    """Return the message in an error file of torch.distributed.elastic and the script's line; empty if there is
    none."""
    message = file.get("message") if isinstance(file, dict) else None
    stack = ""
    if isinstance(message, dict):
        stack = str((message.get("extraInfo") or {}).get("py_callstack", ""))
        message = message.get("message")
    frames = [(name, int(number), function) for name, number, function in _FRAME.findall(stack)]
    return (message[:_MAX_MESSAGE_CHARS], _line(frames, folder)) if isinstance(message, str) else ("", "")


def _line_of_stack(printed: str, folder: str) -> str:
    """Return the line of the script in what faulthandler has printed. The current thread counts, and then the main
    thread, which is the last; empty if the script is on neither stack."""
    threads = re.split(r"^(?:Current t|T)hread ", printed, flags=re.MULTILINE)[1:]
    current = [text for text in threads if f"\nCurrent thread {text}" in f"\n{printed}"]
    for text in (*current, *threads[-1:]):
        frames = [(name, int(number), function) for name, number, function in _FRAME.findall(text)]
        if line := _line(frames[::-1], folder):
            return line
    return ""


def _sentence(kind: str, message: str, mistake: str) -> ErrorReport:
    return ErrorReport(type=kind, message=message, traceback="", phase=Phase.SCRIPT, mistake=mistake)


def _of_exception(raised: dict[str, Any], folder: str) -> tuple[ExitKind, ErrorReport]:
    chain = raised["chain"]
    error_class = error_class_of([Link(link["type"], link["message"], link["errno"]) for link in chain])
    report = ErrorReport(
        type=chain[0]["type"],
        message=chain[0]["message"][:_MAX_MESSAGE_CHARS],
        traceback=raised["traceback"],
        phase=Phase.SCRIPT,
        error_class=error_class,
        line=_line(raised["frames"], folder),
    )
    if error_class is not ErrorClass.PLAIN:
        return ExitKind.WORKER_FAULT, report
    is_broken = any(map(_is_broken_collective, chain))
    return ExitKind.COLLECTIVE_FAILED if is_broken else ExitKind.USER_ERROR, report


def _is_broken_collective(link: dict[str, Any]) -> bool:
    names = link["bases"]
    is_of_torch = any(name.startswith("torch.") and name.endswith(f".{_DIST_ERROR}") for name in names)
    return is_broken_collective(is_of_torch, _RUNTIME_ERROR in names, link["message"], link["raising_file"])


def _line(frames: Sequence[Sequence[Any]], folder: str) -> str:
    """`train.py:41 in step()`: the innermost line of the user's own code; empty: none is on the stack."""
    for file, number, function in reversed(frames):
        if owner_of(file) is FrameOwner.TASK:
            return line_in(file.removeprefix(folder.rstrip(os.sep) + os.sep), number, function)
    return ""
