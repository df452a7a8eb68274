"""Processes by the session that they belong to, as /proc shows them: who is in it, what it runs, and how to end all.

A session outlives its leader, and its number is not given to another process while one member lives. Used by the
embedded cluster only: nothing else here starts processes that it must find again.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

_STOP_TIMEOUT_S = 20.0


class SessionsRemain(Exception):
    """Processes that cannot be ended."""


def session_members(leader: int) -> list[int]:
    """DoubleBufferedState processes of the session; zombies have ended."""
    return [pid for pid in _of_session(leader) if _stat(pid)[1] not in ("Z", "")]


def died_in_session(leader: int) -> list[str]:
    """Names of its programs that have died, and whose parent has not asked yet; cut to 15 letters by the kernel."""
    return [name for pid in _of_session(leader) for name, state in [_stat(pid)] if state == "Z"]


def command_of(pid: int) -> tuple[str, ...]:
    """Its command line; empty: it is gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(command.decode(errors="replace").split("\0")[:-1])


def end_session(leader: int) -> None:
    """Kill every process of the session, also those that moved to groups of their own, until none is left."""
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while members := session_members(leader):
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        _reap(leader)
        if time.monotonic() > deadline:
            raise SessionsRemain(f"processes {members} of session {leader} cannot be ended")
        time.sleep(0.02)
    _reap(leader)


def listens(address: str) -> bool:
    """Something accepts connections at host:port."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _of_session(leader: int) -> Iterator[int]:
    """Asks the kernel by process: to read every one's `stat` took 20 ms a look, once a second for each node."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                yield int(entry.name)
        except ProcessLookupError:
            continue  # gone meanwhile


def _stat(pid: int) -> tuple[str, str]:
    """Name and state (one letter), as /proc has them; empty: it is gone."""
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
