"""Starts the demo's server and ends all of its processes, however the demo ends.

On Linux the demo becomes the subreaper of its descendants (PR_SET_CHILD_SUBREAPER), so a process whose parent has ended
is still found among them, and the server receives SIGTERM if the demo is killed. On other systems only the server's
process group is killed.
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
    """A process of `shoal serve`. Call `stop` in a `finally` block."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, outlive: bool) -> None:
        """`outlive`: the server keeps running after the demo has ended (`--keep`)."""
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
        """Return when the server ends, after `seconds` at the latest."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def log_tail(self, num_lines: int = 15) -> tuple[str, ...]:
        return tuple(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def owns(self, pid: int) -> bool:
        """Whether `pid` is a descendant of the server. The demo sends signals to no other process."""
        return pid in descendants(self.pid) or pid in self._below_this_process()

    def stop(self, grace_s: float = 20.0) -> None:
        """Send SIGTERM, wait, then kill the remaining processes. Idempotent; a second Ctrl-C ends the wait."""
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
        _sweep(self._below_this_process())

    def _below_this_process(self) -> dict[int, str]:
        """Descendants of this process that are newer than the server; they include orphans of the server."""
        return {pid: started for pid, started in descendants(os.getpid()).items() if pid not in self._not_ours}


def descendants(root: int) -> dict[int, str]:
    """Pid and start time of every descendant of `root`; empty on systems without /proc."""
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
    """Start time of a process; it distinguishes the process from a later one with the same pid."""
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
    """Fields of /proc/PID/stat, beginning with the state. The name before it may contain spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
