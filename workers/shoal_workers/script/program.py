"""What runs in a script's own process, from the fork to its end: it finds what a new interpreter would have.

    leave_guardian    right after the fork: a session of its own, default signals, the guardian's death is its own
    run               environment, directory, arguments and streams; then the script as `__main__`

An exception that the script does not catch is printed as Python prints it, and described for the runner in a file in
memory, as is a SystemExit with a status or a text; then the process ends as Python ends. Imports the standard library
only, and nothing that the script could find changed. Called by guardian.py.
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import importlib
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import ModuleType, TracebackType
from typing import Any

from shoal_workers.forkserver.code_path import restore_code
from shoal_workers.raise_place import raising_file

_PR_SET_PDEATHSIG = 1
_MAX_TEXT = 20_000
_MAX_LINKS = 10
_MAX_FRAMES = 200
_OF_EVERY_PROCESS = frozenset(
    {"__main__", "_collections_abc", "_sitebuiltins", "abc", "builtins", "codecs", "encodings", "genericpath", "io"}
    | {"marshal", "os", "posixpath", "site", "stat", "sys", "time", "zipimport"}
)
"""Modules that an interpreter has imported before it runs a script."""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(slots=True)
class Task:
    """What the process runs. Exactly one of `file` and `module` is set."""

    file: str | None
    module: str | None
    args: list[str]
    env: dict[str, str]
    """The whole environment."""
    cwd: str
    door: str = ""
    """Module whose `run` is given the script, to run it on this rank or not; empty: the script runs on every rank."""
    report: int = -1
    """Descriptor of the file for the exception."""
    error_file: int = -1
    """Descriptor of the file that torchrun promises."""


def leave_guardian(guardian: int) -> None:
    """Called in the new process, with the guardian's pid."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != guardian:  # it died before
        os._exit(1)
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = number in _IGNORED_BY_PYTHON
        with suppress(OSError, ValueError):  # those that the C library keeps for itself
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def run(task: Task) -> None:
    """Run the script. Raises SystemExit at its end, for the interpreter to end as after any program."""
    _become(task)
    try:
        if task.door:
            importlib.import_module(task.door).run(lambda: _run_script(task))
        else:
            _run_script(task)
    except SystemExit as end:
        if end.code:
            text, status = ("", end.code) if isinstance(end.code, int) else (_short(str(end.code)), 1)
            _report(task, {"text": text, "status": status, "frames": _frames(end)})
        raise
    except BaseException as error:
        error = error.with_traceback(_from_script(error.__traceback__))
        _report(task, described(error))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _report(task: Task, description: dict[str, Any]) -> None:
    os.write(task.report, json.dumps({"at": time.time(), **description}).encode())


def _become(task: Task) -> None:
    os.environ.clear()
    os.environ.update(task.env)
    if "TORCHELASTIC_RUN_ID" in task.env:
        # The guardian's descriptor: a child of the script, or another program in its process, has others of its own.
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"/proc/{os.getppid()}/fd/{task.error_file}"
    os.chdir(task.cwd)
    if task.file is not None:
        sys.argv = [task.file, *task.args]
        sys.path.insert(0, os.path.dirname(os.path.abspath(task.file)))  # noqa: PTH100, PTH120
        command = [task.file]
    else:
        sys.argv = ["-m", *task.args]
        sys.path.insert(0, task.cwd)
        command = ["-m", str(task.module)]
    sys.orig_argv = [sys.executable, "-u", *command, *task.args]
    _show_in_ps(["python", "-u", *command, *task.args])
    restore_code()
    _forget_shadowed(sys.path[0])
    # Unbuffered, as torchrun starts Python: what is printed before a crash is not lost.
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout = _unbuffered(1, "strict")
    sys.stderr = _unbuffered(2, "backslashreplace")
    faulthandler.enable(sys.stderr)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # otherwise all forks of this process would have the same state
    if (torch := sys.modules.get("torch")) is not None and (threads := task.env.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(max(1, int(threads)))  # the variable is read when torch is imported
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main


def _show_in_ps(command: list[str]) -> None:
    """Give `ps` the command of the script: write it over the one of the guardian, as far as there is room."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b") ")[2].split()
        begin, end = int(fields[45]), int(fields[46])
        text = b"\0".join(map(os.fsencode, command))[: end - begin - 1] if begin else b""
        if text:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _unbuffered(descriptor: int, errors: str) -> io.TextIOWrapper:
    raw: Any = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)


def _forget_shadowed(folder: str) -> None:
    """Modules that were imported before the fork, and in whose place a new interpreter would find another one beside
    the script."""
    try:
        beside = {name.partition(".")[0] for name in os.listdir(folder)}  # noqa: PTH208
    except OSError:
        return
    for name in (beside & sys.modules.keys()) - _OF_EVERY_PROCESS:
        file = getattr(sys.modules[name], "__file__", None)
        spec = PathFinder.find_spec(name, [folder])
        if file is None or file.startswith(folder + os.sep) or spec is None or spec.origin is None:
            continue
        for module in [
            module_name for module_name in sys.modules if module_name == name or module_name.startswith(f"{name}.")
        ]:
            del sys.modules[module]


def _run_script(task: Task) -> None:
    if task.file is not None:
        _run_file(task.file)
    else:
        assert task.module is not None
        _run_module(task.module)


def _run_file(file: str) -> None:
    path = os.path.abspath(file)  # noqa: PTH100
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec")
    main = sys.modules["__main__"]
    main.__file__ = path
    main.__dict__["__cached__"] = None
    exec(code, main.__dict__)


def _run_module(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _from_script(step: TracebackType | None) -> TracebackType | None:
    """Without the frames above the script's own: those of this module and of runpy."""
    while step is not None and step.tb_frame.f_globals.get("__name__") != "__main__":
        step = step.tb_next
    return step


def described(error: BaseException) -> dict[str, Any]:
    """What the runner needs to know, in plain values."""
    return {
        "traceback": _short("".join(traceback.format_exception(error))),
        "frames": [[file, line, name] for file, line, name in _frames(error)],
        "chain": [_link(link) for link in _chain(error)],
    }


def _frames(error: BaseException) -> list[tuple[str, int, str]]:
    """File, line and function, outermost first."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    return frames[-_MAX_FRAMES:]


def _chain(error: BaseException) -> list[BaseException]:
    """Return the exception and what it was raised from, the newest first."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(links) < _MAX_LINKS and all(link is not known for known in links):
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


def _link(error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)
    except Exception as other:
        message = f"(its text cannot be made: {type(other).__qualname__})"
    return {
        "type": _name(type(error)),
        "message": _short(message),
        "errno": error.errno if isinstance(error, OSError) else None,
        "raising_file": raising_file(error),
        "bases": [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__],
    }


def _name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _short(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
