"""How a forked worker ended: written by its fork server, which reaps it, and read by the other processes of the node.

    SOCKET.shoal-exits/PID        {"code": 3} or {"signal": 9, "out_of_memory": true}; SOCKET is the raylet's
    SOCKET.shoal-exits/PID.stack  what the worker's threads did when it crashed, written by faulthandler in the worker
    SOCKET.shoal-exits/PID.stdout, .stderr  the end of its output, unless Ray's log has it (engine/process/tee.py)

Hidden here: these files, how a kill for lack of memory is recognised, and how the place of a crash is found in
the stacks. Ray reports no exit status of an actor's process. Only the process that reaps it learns it. Workers that
were not forked (those with GPUs) leave no such file. `shoal check` uses the words for its own process that tries a
task.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from shoal_workers.machine_limits import groups_of

_KEPT = 256
OUT_OF_MEMORY = "was killed by the kernel: out of memory"


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """One of `code` and `signal` is set."""

    code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    """The kernel has killed it: the memory of its cgroup or of the host was exhausted."""
    place: str = ""
    """Where it crashed: ` in validation, at digits.py:41 in loss()`; empty: not known."""

    def words(self) -> str:
        """Return the exit in words without a subject: `was killed by signal 9 (SIGKILL)`."""
        if self.out_of_memory:
            return OUT_OF_MEMORY
        if self.signal is None:
            return f"exited with {self.code}"
        try:
            name = f" ({signal.Signals(self.signal).name})"
        except ValueError:  # a real-time signal
            name = ""
        return f"was killed by signal {self.signal}{name}{self.place}"


class Recorder:
    """Reaps children, and writes down how each one ended. In the fork server only, which has one thread."""

    def __init__(self, raylet_socket: str) -> None:
        self._folder = _folder(raylet_socket)
        self._memory_kills = MemoryKills()

    def reap(self, pidfd: int, pid: int) -> None:
        """The child has ended."""
        with suppress(ChildProcessError, OSError):
            ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
            if ended is not None:
                self._write(pid, self._status(ended))

    def _status(self, ended: os.waitid_result) -> ExitStatus:
        if ended.si_code == os.CLD_EXITED:
            return ExitStatus(code=ended.si_status)
        has_killed = self._memory_kills.have_grown()
        return ExitStatus(signal=ended.si_status, out_of_memory=ended.si_status == signal.SIGKILL and has_killed)

    def _write(self, pid: int, status: ExitStatus) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for old in sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)[: -_KEPT + 1]:
            old.unlink(missing_ok=True)
        new = self._folder / f".{pid}"
        new.write_text(json.dumps(asdict(status)), encoding="ascii")
        new.rename(self._folder / str(pid))


class MemoryKills:
    """How many processes of this control group the kernel has killed for lack of memory."""

    def __init__(self) -> None:
        self._counter = _oom_counter()
        self._known = _oom_kills(self._counter)

    def have_grown(self) -> bool:
        """Return whether it has killed one since the call before."""
        known, self._known = self._known, _oom_kills(self._counter)
        return self._known > known


def read(raylet_socket: str, pid: int) -> ExitStatus | None:
    """Return None if the process lives, or nothing is known of its end."""
    try:
        status = ExitStatus(**json.loads((_folder(raylet_socket) / str(pid)).read_text(encoding="ascii")))
    except (OSError, ValueError, TypeError):
        return None
    if status.signal is None or status.out_of_memory:
        return status
    with suppress(OSError):
        return replace(status, place=place_of_crash(_stack_file(raylet_socket, pid).read_text(errors="replace")))
    return status


def record_crashes(raylet_socket: str) -> IO[str] | None:
    """Called in a worker: if it crashes, its stacks are written beside its exit status. The file must stay open."""
    if folder_of(raylet_socket) is None:
        return None
    try:
        file = _stack_file(raylet_socket, os.getpid()).open("w")
    except OSError:
        return None
    faulthandler.enable(file, all_threads=True)
    return file


def folder_of(raylet_socket: str) -> Path | None:
    """Return the folder of the files of a node's workers; None if there is no place for them."""
    if not raylet_socket:
        return None
    try:
        _folder(raylet_socket).mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return _folder(raylet_socket)


def _folder(raylet_socket: str) -> Path:
    return Path(f"{raylet_socket}.shoal-exits")


def _stack_file(raylet_socket: str, pid: int) -> Path:
    return _folder(raylet_socket) / f"{pid}.stack"


def _oom_counter() -> Path | None:
    """Return the file with the number of processes of this control group that the kernel has killed for memory."""
    for group in groups_of("memory"):
        counter = group.directory / ("memory.events" if group.is_v2 else "memory.oom_control")
        if counter.exists():
            return counter
    return None


def _oom_kills(counter: Path | None) -> int:
    with suppress(OSError, ValueError):
        if counter is not None:
            for line in counter.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


_STACK_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (\S+)$', re.MULTILINE)
_TRAINING_THREAD = "shoal_workers/engine/engine.py"
_PHASES = (
    ("engine/step/validation.py", "in validation"),
    ("engine/state/saving.py", "while saving"),
    ("engine/state/restore.py", "while restoring"),
    ("engine/step/", "in a training step"),
    ("engine/model/build.py", "while building the model"),
    ("engine/engine.py", "while preparing"),
)
"""The first one that is on the stack counts."""
_LIBRARY = re.compile(r"/(site-packages|dist-packages|python3[.\d]*)/|^<")


def place_of_crash(stacks: str) -> str:
    """` in validation, at digits.py:41 in loss()`, with the task's own line; empty if nothing is known. Pure.

    Args:
        stacks: what faulthandler wrote:

            Thread 0x00007f2b (most recent call first):
              File "/home/me/digits.py", line 41 in loss
              File ".../shoal_workers/engine/task/task.py", line 84 in evaluate
    """
    # the training thread counts, whichever thread got the signal
    threads = [
        _STACK_FRAME.findall(text) for text in re.split(r"^(?:Current t|T)hread ", stacks, flags=re.MULTILINE)[1:]
    ]
    training = next((frames for frames in threads if any(_TRAINING_THREAD in file for file, _, _ in frames)), None)
    if training is None:
        return ""
    phase = next((message for part, message in _PHASES if any(part in file for file, _, _ in training)), "")
    frames_of_task = [frame for frame in training if "shoal_workers/" not in frame[0] and not _LIBRARY.search(frame[0])]
    line = (
        f", at {_shown_path(frames_of_task[0][0])}:{frames_of_task[0][1]} in {frames_of_task[0][2]}()"
        if frames_of_task
        else ""
    )
    return f" {phase}{line}" if phase else line


def _shown_path(file: str) -> str:
    """Relative to the longest entry of sys.path that contains the file; else its name."""
    roots = [root.rstrip("/") + "/" for root in sys.path if len(root) > 1]
    known = max((root for root in roots if file.startswith(root)), key=len, default=None)
    return file.rpartition("/")[2] if known is None else file.removeprefix(known)
