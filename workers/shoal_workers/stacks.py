"""Stacks of training threads: of this process by its own frames, of another process of this node by py-spy. What a
script does is the stack of the main thread of its process.

A process that is stopped, or that holds the GIL in native code, answers no call. py-spy reads its memory from outside;
that needs the permission to trace it (the same user, and `ptrace_scope` 0; or CAP_SYS_PTRACE). Called on threads of the
worker, and by the supervisor for workers of its own node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from shoal_workers.contract import Collective, Progress, StackSource, WorkerStack
from shoal_workers.contract.messages import Frame
from shoal_workers.contract.suspects import Link
from shoal_workers.ray_internals import is_process_of

_ENTRY_FILE = "shoal_workers/actor.py"
_SCRIPT_FILE = "shoal_workers/script/program.py"
_ENTRIES = frozenset({"prepare", "run"})
"""The calls of the worker's actor that run on its training thread."""
_MAX_FRAMES = 100
_TIMEOUT_S = 5.0
_SITE, _STANDARD = "/site-packages/", f"/lib/python{sys.version_info.major}.{sys.version_info.minor}/"


class StackUnavailable(Exception):
    """The stack of another process cannot be read; the message is one line."""


Signs = tuple[Collective | None, tuple[Link, ...]]
STOPPED = Frame(function="do_signal_stop", file="<kernel>", line=0)
"""The innermost frame of a process that a signal has stopped."""


def of_this_worker(worker_id: str, now: Progress, signs: Signs = (None, ())) -> WorkerStack:
    """Describe what the training thread of this process does. Called on another thread."""
    frames, module = read_local_stack()
    return WorkerStack(
        worker_id=worker_id,
        pid=os.getpid(),
        frames=frames,
        module=module,
        phase=now.phase,
        step=now.step,
        collective=signs[0],
        links=signs[1],
    )


def of_script(worker_id: str, now: Progress, pid: int) -> WorkerStack:
    """Describe what the main thread of a script's process does. Blocks as `read_stack`. `pid`: 0 if no process runs."""
    frames: tuple[Frame, ...] = ()
    error = ""
    if pid:
        try:
            frames = (STOPPED,) if is_stopped(pid) else ()
            frames += find_script_frames(_dump(pid, native=False), pid)
        except StackUnavailable as unavailable:
            error = "" if frames else str(unavailable)
    return WorkerStack(
        worker_id=worker_id,
        pid=pid or os.getpid(),
        frames=frames,
        phase=now.phase,
        step=now.step,
        source=StackSource.NONE if error else StackSource.PY_SPY,
        error=error,
    )


def of_worker(pid: int, *, native: bool = False) -> tuple[Frame, ...] | str:
    """Return the frames of another worker of this node, or the reason why there are none. Blocks as `read_stack`."""
    if not is_worker_process(pid):
        return f"process {pid} has ended"
    stopped = (STOPPED,) if is_stopped(pid) else ()
    try:
        return (*stopped, *read_stack(pid, native=native))
    except StackUnavailable as error:
        return stopped or str(error)


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP or a debugger has stopped it: it runs no instruction until it is continued."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def is_worker_process(pid: int) -> bool:
    """Return whether this pid is alive and a worker's."""
    return is_process_of("WorkerActor", pid)


def read_local_stack() -> tuple[tuple[Frame, ...], str]:
    """Return the frames of this process's training thread, and the module of the model that it is in.

    Called on another thread."""
    for top in sys._current_frames().values():
        chain = list(_walk_outwards(top))
        frames = cut_training_frames([_describe_frame(frame) for frame in chain])
        if frames is not None:
            return frames, _find_module(chain[: len(frames)])
    return (), ""


def read_stack(pid: int, *, native: bool = False) -> tuple[Frame, ...]:
    """Read the frames of the training thread of another process of this node. Blocks for some tenths of a second.

    Args:
        native: also frames of native code; the process is paused meanwhile.

    Raises:
        StackUnavailable: there is no py-spy, no permission, or no such process.
    """
    return find_training_frames(_dump(pid, native=native))


def _dump(pid: int, *, native: bool) -> list[dict[str, Any]]:
    """Raises StackUnavailable."""
    program = find_py_spy()
    if program is None:
        raise StackUnavailable("py-spy is not installed on the node")
    options = ["--native"] if native else ["--nonblocking"]
    command = [program, "dump", "--json", "--full-filenames", *options, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise StackUnavailable(f"py-spy did not answer within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise StackUnavailable(f"py-spy failed: {lines[-1]}")
    threads: list[dict[str, Any]] = json.loads(done.stdout)
    return threads


def find_training_frames(threads: Sequence[dict[str, Any]]) -> tuple[Frame, ...]:
    """Return the frames of the training thread in the output of `py-spy dump --json`."""
    for thread in threads:
        if (frames := cut_training_frames(_parse_frames(thread))) is not None:
            return frames
    return ()


def find_script_frames(threads: Sequence[dict[str, Any]], pid: int) -> tuple[Frame, ...]:
    """Return the frames of the main thread in such an output, without those that have started the script."""
    for thread in threads:
        if thread.get("os_thread_id") == pid:
            frames = _parse_frames(thread)
            starts = (depth for depth, frame in enumerate(frames) if frame.file.endswith(_SCRIPT_FILE))
            return tuple(frames[: next(starts, len(frames))][:_MAX_FRAMES])
    return ()


def _parse_frames(thread: dict[str, Any]) -> list[Frame]:
    return [
        Frame(function=f["name"].rpartition(".")[2], file=_shorten_path(f["filename"]), line=f["line"])
        for f in thread["frames"]
    ]


def cut_training_frames(frames: Sequence[Frame]) -> tuple[Frame, ...] | None:
    """Return the frames inside of the worker's `run` or `prepare`; None if it is another thread."""
    for depth, frame in enumerate(frames):
        if frame.file.endswith(_ENTRY_FILE):
            is_entry = any(f.function in _ENTRIES and f.file.endswith(_ENTRY_FILE) for f in frames[depth:])
            return tuple(frames[:depth][:_MAX_FRAMES]) if is_entry else None
    return None


def find_py_spy() -> str | None:
    """Return the program beside the interpreter, else that in PATH: a worker may have another PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _walk_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe_frame(frame: FrameType) -> Frame:
    code = frame.f_code
    return Frame(function=code.co_name, file=_shorten_path(code.co_filename), line=frame.f_lineno)


def _shorten_path(path: str) -> str:
    """Make a path relative to its entry of sys.path.

    `shapes.py` of the user, `site-packages/torch/...`, `python3.11/threading.py`: who wrote it can be seen."""
    for library in (_SITE, _STANDARD):
        _, separator, after = path.partition(library)
        if separator:
            return library.removeprefix("/").removeprefix("lib/") + after
    entries = [entry.rstrip("/") + "/" for entry in sys.path if len(entry) > 1]
    return path.removeprefix(max((e for e in entries if path.startswith(e)), key=len, default=""))


def _find_module(chain: Sequence[FrameType]) -> str:
    """Return the name of the innermost module of the model that is called, as the outermost one names it.

    In a backward pass that of the FSDP unit whose hook runs. Empty if there is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    owners = [owner for frame in chain if (owner := frame.f_locals.get("self")) is not None]
    for owner in owners:
        name = getattr(owner, "_module_fqn", None)
        if isinstance(name, str):
            return name
    modules = [owner for owner in owners if isinstance(owner, torch.nn.Module)]
    if not modules:
        return ""
    return next((name for name, module in modules[-1].named_modules() if module is modules[0]), "")
