"""Finds the processes of a session in /proc: their pids, their programs, and how to end all of them.

A session outlives its leader, and its number is not reused while one of its processes lives. Used by the embedded
cluster only, which must find the processes of an earlier control plane.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from shoal_workers.forkserver.orphans import parents

_STOP_TIMEOUT_S = 20.0


class SessionsRemain(Exception):
    """Some processes cannot be ended."""


def pids_of_session(leader: int) -> list[int]:
    """Pids of the session's live processes. A zombie does not count."""
    return [pid for pid in _of_session(leader) if _stat(pid)[1] not in ("Z", "")]


def died_in_session(leader: int) -> list[str]:
    """Names of the session's zombies; the kernel cuts a name to 15 letters."""
    return [name for pid in _of_session(leader) for name, state in [_stat(pid)] if state == "Z"]


def command_of(pid: int) -> tuple[str, ...]:
    """The command line of a process; empty if it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(command.decode(errors="replace").split("\0")[:-1])


def end_session(leader: int) -> None:
    """Kills every process of the session, whatever its process group, until there is none. Kills also what they have
    started in other sessions, as a task may."""
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while pids := pids_of_session(leader):
        for pid in [*_below(pids), *pids]:  # before their ancestors, by which they are found
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _reap(leader)
        if time.monotonic() > deadline:
            raise SessionsRemain(f"processes {pids} of session {leader} cannot be ended")
        time.sleep(0.02)
    _reap(leader)


def _of_session(leader: int) -> Iterator[int]:
    """Pids of the session, with one system call per process. Reading each `stat` file took 20 ms per call, once a
    second for each node."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                yield int(entry.name)
        except ProcessLookupError:
            continue  # it has ended since


def _below(pids: list[int]) -> list[int]:
    """Descendants of these processes that are in another session."""
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    descendants, left = [], [*pids]
    while left:
        left = [child for pid in left for child in children.get(pid, ()) if child not in pids]
        descendants += left
    return descendants


def _stat(pid: int) -> tuple[str, str]:
    """Name and state (one letter) of a process; empty if it has ended."""
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    except OSError:
        return "", ""
    return head.partition("(")[2], tail[:1]


def _reap(leader: int) -> None:
    try:
        os.waitpid(leader, os.WNOHANG)
    except ChildProcessError:
        pass  # started by an earlier control plane
