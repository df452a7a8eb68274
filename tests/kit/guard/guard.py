"""Ends what a test run or a benchmark has started, however it ends: in order, by a signal, killed, or by a timeout.

tests/conftest.py calls `guard_this_process` when pytest starts. `Guard` alone is for the processes of one server.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

_PROGRAM = Path(__file__).parent / "process_guard.py"
_VARIABLE = "SHOALTEST_RUN"
_PR_SET_PDEATHSIG = 1


class Guard:
    """A process that kills every process that has `mark` in its environment when `sweep` is called or this one ends."""

    def __init__(self, mark: str, state_dir: Path | None = None) -> None:
        """`state_dir`: of a server, which hides its environment."""
        command = [
            sys.executable,
            "-S",
            str(_PROGRAM),
            str(os.getpid()),
            mark,
            *([str(state_dir)] if state_dir else []),
        ]
        # It has no mark in its own environment, so the guard of a run inside a run outlives that run.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env={})

    def sweep(self) -> None:
        """Returns when they are gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class _GuardedRun:
    """Programs that are started carry the mark. Children that execute no program do not: the kernel ends them."""

    def __init__(self) -> None:
        self._pid, self._libc, self._forks_in_main_thread = os.getpid(), ctypes.CDLL(None), False
        mark = os.environ[_VARIABLE] = secrets.token_hex(8)
        self._guard = Guard(f"{_VARIABLE}={mark}")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        os.register_at_fork(before=self._before_fork, after_in_child=self._in_child)

    def _before_fork(self) -> None:
        self._forks_in_main_thread = threading.current_thread() is threading.main_thread()

    def _in_child(self) -> None:
        if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The signal comes when the thread that has forked ends, which the main thread does last.
        if self._forks_in_main_thread and os.getppid() == self._pid:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_runs: list[_GuardedRun] = []


def guard_this_process() -> None:
    """From now on whatever this process starts ends with it. SIGTERM is an interrupt, so that fixtures are torn down.
    Once for each process."""
    if not _runs:
        _runs.append(_GuardedRun())
