"""Processes on this machine, by pid and session: who lives, who is whose, and ending what the benchmark started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from shoal_api.demo.processes import descendants

_PR_SET_CHILD_SUBREAPER = 36


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def session_members(leader: int) -> dict[int, str]:
    """Pid -> command line of every living process of a session."""
    members = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                if os.getsid(pid) == leader and is_alive(pid):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    members[pid] = command.decode(errors="replace").strip()
    return members


def end_session(leader: int) -> None:
    """SIGKILL, until nobody is left."""
    while members := session_members(leader):
        for pid in members:
            send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(leader, os.WNOHANG)
        time.sleep(0.02)


def end_tree(root: int) -> None:
    """SIGKILL for a child of this process and all that it started."""
    below = descendants(root)
    for pid in (root, *below):
        send(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(root, 0)


def adopt_orphans() -> None:
    """Whatever loses its parent below this process becomes its child, so that `end_all` finds it. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all() -> dict[int, str]:
    """SIGKILL for everything below this process; what it was, by pid."""
    found: dict[int, str] = {}
    while below := [pid for pid in descendants(os.getpid()) if is_alive(pid)]:
        for pid in below:
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
    return found


def send(pid: int, number: signal.Signals) -> float:
    """Send a signal; the time at which it was sent."""
    at = time.time()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return at


def died_after_s(pid: int, since: float, timeout_s: float) -> float | None:
    """Seconds from `since` until a process was gone; looks every 10 ms. None: it still lives."""
    while is_alive(pid):
        if time.time() - since > timeout_s:
            return None
        time.sleep(0.01)
    return time.time() - since
