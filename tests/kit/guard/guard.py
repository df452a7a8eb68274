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
import time
from contextlib import suppress
from pathlib import Path

from kit.guard.process_guard import marked

_PROGRAM = Path(__file__).parent / "process_guard.py"
_VARIABLE = "SHOALTEST_RUN"
_PR_SET_PDEATHSIG = 1
LAST_S = float(os.environ.get("SHOALTEST_LAST_S", "10"))
"""Seconds for what a test has asked to end: a raylet waits for its workers."""
DUMPS_S = 30.0
"""One takes a tenth of a second on a machine that does nothing else."""
_OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python ends them with the process that they serve."""


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
        os.environ[_VARIABLE] = secrets.token_hex(8)
        self._mark = f"{_VARIABLE}={os.environ[_VARIABLE]}"
        self._guard = Guard(self._mark)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        os.register_at_fork(before=self._before_fork, after_in_child=self._in_child)

    def processes(self) -> dict[int, str]:
        """Pid -> command of each process that this run has started and that has not ended."""
        commands = {pid: _command(pid) for pid in marked(self._mark.encode(), None)}
        return {
            pid: command for pid, command in commands.items() if command and not any(n in command for n in _OF_PYTHON)
        }

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


def stacks() -> str:
    """Stacks of all Python processes that this run has started, read from outside by py-spy. Those that cannot be read
    within DUMPS_S are left out."""
    dumps, deadline = [], time.monotonic() + DUMPS_S
    for pid, command in _runs[0].processes().items():
        dump = [str(Path(sys.executable).with_name("py-spy")), "dump", "--nonblocking", "--pid", str(pid)]
        with suppress(subprocess.TimeoutExpired):
            limit_s = max(0.1, deadline - time.monotonic())
            ran = subprocess.run(dump, capture_output=True, text=True, check=False, timeout=limit_s)
            if ran.returncode == 0:
                dumps.append(f"{command}\n{ran.stdout}")
    return "\n".join(dumps) or "no other Python process of this run is alive"


def left_behind() -> list[str]:
    """A line for each process that the tests have left, with the test that started it. Waits for those that end."""
    deadline = time.monotonic() + LAST_S
    while (left := _runs[0].processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {pid}, started during {_test(pid)}: {command}" for pid, command in left.items()]


def _command(pid: int) -> str:
    """Empty if the process has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _test(pid: int) -> str:
    """The test in which the process was started: pytest keeps its name in the environment."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "an unknown test"
    names = [value.removeprefix("PYTEST_CURRENT_TEST=") for value in variables if "PYTEST_CURRENT_TEST=" in value]
    return names[0] if names else "no test"
