"""Processes of this machine by pid and session: which are alive, and how to end those that a test or benchmark started.

Called by tests/ and bench/. Touches only the processes whose pid or session the caller names, or its own descendants.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from shoal_workers.forkserver.orphans import adopt_orphans as adopt_orphans  # `end_all` finds what it adopts
from shoal_workers.forkserver.orphans import parents


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def started_at(pid: int) -> int | None:
    """When the process started, in ticks since boot: the same number with another start is another process, or a
    thread of one. None: there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19])
    except OSError:
        return None


def cpu_seconds(pid: int) -> float:
    """User and system time of the whole process, so far. Other programs on the machine do not count in it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> set[int]:
    """Pids of the children of a process, of their children, and so on."""
    parent_by_pid = parents()
    below: set[int] = set()
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parent_by_pid.items() if parent in frontier} - below
        below |= frontier
    return below


def session_members(leader: int) -> dict[int, str]:
    """Pid -> command line of every live process of a session."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                if os.getsid(pid) == leader and is_alive(pid):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[pid] = command.decode(errors="replace").strip()
    return found


def end_session(leader: int) -> None:
    """Send SIGKILL until the session has no process left."""
    while left := session_members(leader):
        for pid in left:
            send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(leader, os.WNOHANG)
        time.sleep(0.02)


def end_tree(root: int) -> None:
    """Send SIGKILL to a child of this process and to all its descendants."""
    below = descendants(root)
    for pid in (root, *below):
        send(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(root, 0)


def end_all() -> dict[int, str]:
    """Send SIGKILL to all descendants of this process; returns pid -> command line."""
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
    """Send a signal; returns the time at which it was sent."""
    at = time.time()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return at


def died_after_s(pid: int, since: float, timeout_s: float) -> float | None:
    """Seconds from `since` until a process was gone, polled every 10 ms. None: it is still alive."""
    while is_alive(pid):
        if time.time() - since > timeout_s:
            return None
        time.sleep(0.01)
    return time.time() - since
