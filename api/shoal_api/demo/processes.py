"""Starts the server of the demo, waits until it is ready, and ends all of its processes, however the demo ends.

On Linux the demo adopts the orphans of its descendants, so a process whose parent has ended is still found among its
children, and the server receives SIGTERM if the demo is killed. On other systems only the server's process group is
killed.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from shoal_api.cli.readiness import read_readiness
from shoal_api.cli.session import CliError, ExitCode, Output
from shoal_api.client import Disconnected
from shoal_workers.forkserver.orphans import adopt_orphans, children, end_orphans, parents

_IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_KILL_S = 5.0
"""Seconds for which a stop waits for killed processes to end."""
_SERVER_READY_S = 120.0
_SERVER_POLL_S = 0.2


class ServerProcess:
    """A process of `shoal serve`. Call `stop` in a `finally` block."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, outlive: bool) -> None:
        """`outlive`: the server keeps running after the demo has ended (`--keep`)."""
        if _IS_LINUX and not outlive:
            adopt_orphans()
        # processes that this one has started before are not the server's, and must not be killed with it
        self._earlier_children = children() if _IS_LINUX else set()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent if _IS_LINUX and not outlive else None,
            )
        self.pid = self._process.pid
        self.log = log

    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Return when the server ends, after `seconds` at the latest."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def log_tail(self, num_lines: int = 15) -> tuple[str, ...]:
        return tuple(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def owns(self, pid: int) -> bool:
        """Return True if `pid` is the server, or below it, or was. The demo sends signals to no other process."""
        if not _IS_LINUX:
            return False
        parent_by_pid = parents()
        while parent_by_pid.get(pid, os.getpid()) != os.getpid():
            pid = parent_by_pid[pid]
        return pid in parent_by_pid and pid not in {os.getpid(), *self._earlier_children}

    def stop(self, grace_s: float = 20.0) -> None:
        """Send SIGTERM, wait, then kill the remaining processes. Idempotent; a second Ctrl-C ends the wait."""
        if _IS_LINUX:
            adopt_orphans()  # those of a server that was to outlive this process, too
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline_mono = time.monotonic() + _KILL_S
        while _IS_LINUX and end_orphans(self._earlier_children) and time.monotonic() < deadline_mono:
            time.sleep(_POLL_S)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def await_ready(server: ServerProcess, url: str, output: Output) -> None:
    """Return when the server is ready. Raises CliError with the end of its log if it ends or takes too long."""
    began = time.monotonic()
    spinner: Any = output.stdout.status("") if output.live else nullcontext()
    with spinner as status:
        while True:
            missing = _find_missing(url)
            if not missing:
                break
            if status is not None:
                status.update(f"waiting for {missing} ({time.monotonic() - began:.0f} s)")
            if server.exit_code() is not None:
                raise _failed(server, f"the server ended with exit code {server.exit_code()} before it was ready")
            if time.monotonic() - began > _SERVER_READY_S:
                raise _failed(server, f"the server was not ready after {_SERVER_READY_S:g} s: it waits for {missing}")
            server.wait(_SERVER_POLL_S)
    output.note(f"ready after {time.monotonic() - began:.1f} s", "dim")


def _find_missing(url: str) -> str:
    """Return what the server waits for; empty if it is ready."""
    try:
        answer = read_readiness(url)
    except Disconnected:
        return "the server to start"
    return answer if isinstance(answer, str) else ""


def _failed(server: ServerProcess, message: str) -> CliError:
    return CliError(
        message,
        details=server.log_tail(),
        hint="`shoal doctor` looks for the cause",
        exit_code=ExitCode.FAILED,
    )
