"""Starts the demo's server, and leaves no process of it behind, however the demo ends.

On Linux the demo becomes the reaper of everything below it (PR_SET_CHILD_SUBREAPER), so that even a process whose
parent has gone is still found as its descendant; and the server gets SIGTERM when the demo itself is killed.
Elsewhere the server's own process group is all that is swept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


class ServerProcess:
    """`shoal serve` in a process of its own; use `stop` in a `finally`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, outlive: bool) -> None:
        """`outlive`: the server stays when the demo's process is gone (`--keep`)."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 0 if outlive else 1)
        self._not_ours = set(descendants(os.getpid()))
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if outlive else _die_with_parent,
            )
        self.pid = self._process.pid
        self.log = log

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Return when it ends, or after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def log_tail(self, num_lines: int = 15) -> tuple[str, ...]:
        return tuple(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def owns(self, pid: int) -> bool:
        """Whether `pid` is below the server: the demo never signals anything else."""
        return pid in descendants(self.pid) or pid in self._below_the_demo()

    def stop(self, grace_s: float = 20.0) -> None:
        """Ask it to end, wait, then sweep what is left of it. Idempotent; a second Ctrl-C meanwhile cuts the wait."""
        below = descendants(self.pid)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _sweep({pid: started for pid, started in below.items() if start_time(pid) == started})
        _sweep(self._below_the_demo())

    def _below_the_demo(self) -> dict[int, str]:
        """What came below this process since the server was started; orphans of the server are among them."""
        return {pid: started for pid, started in descendants(os.getpid()).items() if pid not in self._not_ours}


def descendants(root: int) -> dict[int, str]:
    """Pid -> start time of every process below `root`; empty where there is no /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None and fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier and pid not in found}
        found.update({pid: start_time(pid) or "" for pid in frontier})
    return found


def start_time(pid: int) -> str | None:
    """Tells a process from a later one with the same pid."""
    fields = _stat(pid)
    return fields[19] if fields is not None else None


def _sweep(victims: Mapping[int, str]) -> None:
    for pid in victims:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    for pid, started in victims.items():
        while start_time(pid) == started and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    break
            time.sleep(_POLL_S)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; the name before it may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
