"""The guardian of a worker's script: forks its processes, one per generation, and leaves none of them behind.

    python guardian.py [--door=MODULE] [--plain]    standard input is the link to the runner (client.py), a connection
    with messages in JSON

    runner <-- {"ready": true} ------ guardian    what most scripts import is imported
    runner --- {"run": {...}} ------> guardian    fork, and run that in the new process (program.py)
    runner --- {"stop": seconds} ---> guardian    SIGTERM to the script's process, and SIGKILL after that time
    runner <-- {"pid": 123} --------- guardian    the process runs
    runner <-- {"busy": true} ------- guardian    at most once a second: it has used a CPU or printed something
    runner <-- {"raised": true} ----- guardian    the script has failed, and threads of it go on
    runner <-- {"ended": {...}} ----- guardian    it has ended, and nothing that it started is left

The guardian adopts orphans, so what the script leaves is its own child, in whatever session. When the link ends, the
worker has died, and the guardian kills the script and all below it. It has one thread, because it forks, and imports
the standard library only, apart from what is imported for the script before it is forked: torch, and what the script
before has imported (imports.py). Started by client.py, by way of the node's fork server if there is one.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

if __name__ == "__main__":
    # As the first entry it would shadow modules of the script. It stays as the last one: a script may import `shoal`.
    ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    sys.path[0:1] = []
    sys.path[:] = [entry for entry in sys.path if entry != os.environ.get("SHOAL_CODE_PATH")]
    if ROOT not in sys.path:
        sys.path.append(ROOT)

from shoal_workers.forkserver.orphans import SWEEP_S, adopt_orphans, end_orphans, parents
from shoal_workers.script import program
from shoal_workers.script.imports import Imports

LOOK_S = 1.0
LOOK_AT_ALL_S = 10.0
"""Pause between two looks at all processes below the script, which read the whole of /proc, while its own process does
nothing."""
_BUSY_TICKS_PER_S = 2
"""CPU time, of 100 ticks per second, that counts as work. A thread that only waits for the network uses less."""
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals to a whole process group or control group. The guardian ends with its link only."""
PLAIN = "--plain"
"""Argument of a guardian that imports nothing of its scripts."""
WARM_IMPORTS = "SHOAL_WARM_IMPORTS"
"""Variable that a job may set to 0 in `code.env`, for a library that does not bear to be forked after its import."""
_MAX_STDERR_BYTES = 16 << 10
_DOOR = "--door="
"""Argument: a module that every script of the job needs."""
_NO_THREAD_OF_ARROW = ("JE_ARROW_MALLOC_CONF", "background_thread:false")
"""pyarrow's allocator would start a thread when it is imported, and a process with threads does not fork."""
_WARM = ("torch", "torch._dynamo")
"""Modules that nearly every script imports, and that take seconds."""


def main() -> None:
    """Return at the end of each script, in its process."""
    with Connection(os.dup(0)) as link:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.close(nothing)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        adopt_orphans()
        os.environ.setdefault(*_NO_THREAD_OF_ARROW)
        _import_warm()
        learns = PLAIN not in sys.argv and os.environ.get(WARM_IMPORTS) != "0"
        task = Guardian(link, learns=learns).serve()
    if task is None:
        os._exit(0)  # at once: the end of an interpreter with torch takes half a second of CPU time
    program.run(task)


def _import_warm() -> None:
    """A node without torch runs scripts without torch."""
    for name in (*_WARM, *_doors()):
        with suppress(ImportError, OSError):  # or a library that torch needs
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise the collector of each script would copy every page


def _doors() -> list[str]:
    return [argument.removeprefix(_DOOR) for argument in sys.argv if argument.startswith(_DOOR)]


@dataclass(slots=True)
class Script:
    """The script's process."""

    pid: int
    pidfd: int
    report: int
    """File in memory into which the process writes the exception that ends it."""
    error_file: int
    """File in memory for `torch.distributed.elastic.multiprocessing.errors.record`."""
    work: Work
    imports: Imports
    stderr_size: int
    """Size of the standard error when the process began."""
    has_raised: bool = False
    """The runner knows that the script has failed while its process goes on."""
    kill_at_mono: float | None = None
    status: int | None = None


class Guardian:
    """`serve` is the whole life of a guardian.

    Args:
        learns: whether it imports what its scripts have imported.
    """

    def __init__(self, link: Connection, *, learns: bool) -> None:
        self._link = link
        self._learns = learns
        self._script: Script | None = None

    def serve(self) -> program.Task | None:
        """Return in the process of each script, with what it runs; in the guardian itself it returns None, at its
        end."""
        self._send({"ready": True})
        while True:
            try:
                order = self._next_order()
            except (EOFError, OSError):  # the worker has died
                self._end_all()
                return None
            if "run" in order:
                task = self._fork(program.Task(**order["run"]))
                if task is not None:
                    return task
            if "stop" in order and self._script is not None:
                self._stop(self._script, order["stop"])
            if self._script is not None:
                self._look_after(self._script)

    def _next_order(self) -> dict[str, Any]:
        """What has arrived, after waiting for it, for the end of the script, or for the next look; {}: nothing has.
        EOFError or OSError: the link has ended."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        wait_s: float | None = None
        if self._script is not None:
            poll.register(self._script.pidfd, select.POLLIN)
            wait_s = LOOK_S
            if self._script.kill_at_mono is not None:
                wait_s = min(wait_s, max(0.0, self._script.kill_at_mono - time.monotonic()))
        ready = dict(poll.poll(None if wait_s is None else wait_s * 1000))
        order: dict[str, Any] = json.loads(self._link.recv_bytes()) if self._link.fileno() in ready else {}
        return order

    def _fork(self, task: program.Task) -> program.Task | None:
        """Return the task in the new process, and None in the guardian."""
        own_pid = os.getpid()
        report, error_file = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("report", "error-file"))
        imports = Imports()
        # A signal that the new process gets before it reacts as a new process would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        pid = os.fork()
        if pid == 0:
            self._link.close()
            task.report, task.error_file = report, error_file
            program.leave_guardian(own_pid)
            if self._learns:
                imports.note_own()
            return task
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
        self._script = Script(
            pid, os.pidfd_open(pid), report, error_file, Work(pid, time.monotonic()), imports, _printed()[1]
        )
        self._send({"pid": pid})
        return None

    def _stop(self, script: Script, grace_s: float) -> None:
        # Not to its whole group: a loader process that ended would break the save for which the grace is given.
        if script.kill_at_mono is None:
            script.kill_at_mono = time.monotonic() + grace_s
            with suppress(ProcessLookupError):
                os.kill(script.pid, signal.SIGTERM)

    def _look_after(self, script: Script) -> None:
        if script.kill_at_mono is not None and time.monotonic() >= script.kill_at_mono:
            with suppress(ProcessLookupError):
                os.kill(script.pid, signal.SIGKILL)
            script.kill_at_mono = math.inf
        self._reap()
        if script.status is not None:
            self._end_all()
            self._send({"ended": _ended(script)})
            for number in (script.pidfd, script.report, script.error_file):
                os.close(number)
            self._script = None
            if self._learns and not script.imports.repeat():
                self._start_anew()
        elif script.work.has_gone_on(time.monotonic()):
            self._send({"busy": True})
        if self._script is not None and not script.has_raised and os.fstat(script.report).st_size:
            script.has_raised = True
            self._send({"raised": True})

    def _start_anew(self) -> None:
        """As a new interpreter with the same pid and link, which imports nothing of the script's."""
        os.dup2(self._link.fileno(), 0)
        os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), *sys.argv[1:], PLAIN])  # noqa: PTH100

    def _reap(self) -> None:
        """Every child that has ended, orphans too."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self._script is not None and pid == self._script.pid:
                    self._script.status = status

    def _end_all(self) -> None:
        """Kill the script and all that is below the guardian, level by level: orphans become its children."""
        self._reap()
        if self._script is not None and self._script.status is None:
            os.kill(self._script.pid, signal.SIGKILL)
            _, self._script.status = os.waitpid(self._script.pid, 0)
        while end_orphans():
            time.sleep(SWEEP_S)

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # the worker has died, which the next look at the link shows
            self._link.send_bytes(json.dumps(message).encode())


def _ended(script: Script) -> dict[str, Any]:
    assert script.status is not None
    killed = os.WTERMSIG(script.status) if os.WIFSIGNALED(script.status) else None
    code = None if killed is not None else os.WEXITSTATUS(script.status)
    return {
        "code": code,
        "signal": killed,
        "raised": _content(script.report),
        "recorded": _content(script.error_file),
        "printed": _read_end_of_stderr(script.stderr_size) if killed is not None else "",
    }


def _read_end_of_stderr(begin: int) -> str:
    """Return the end of the standard error since `begin`, if that is a file, as in a worker."""
    with suppress(OSError):
        size = os.fstat(2).st_size
        first = max(begin, size - _MAX_STDERR_BYTES)
        return os.pread(2, max(0, size - first), first).decode(errors="replace")
    return ""


def _content(file: int) -> Any:
    """Return None if the file is empty, or the script has written something else than JSON."""
    with suppress(ValueError):
        return json.loads(os.pread(file, os.fstat(file).st_size, 0))
    return None


class Work:
    """Whether the processes of a script do anything: use a CPU, or print.

    Args:
        pid: the script's own process.
        now_mono: monotonic time at which it began.
    """

    def __init__(self, pid: int, now_mono: float) -> None:
        self._pid = pid
        self._ticks = _ticks(pid)
        self._all_ticks = self._ticks
        self._printed = _printed()
        self._looked_mono = self._looked_at_all_mono = now_mono

    def has_gone_on(self, now_mono: float) -> bool:
        """Return whether it does something since the last look; False if that was less than `LOOK_S` ago."""
        since_s = now_mono - self._looked_mono
        if since_s < LOOK_S:
            return False
        self._looked_mono = now_mono
        ticks, before = _ticks(self._pid), self._ticks
        printed, printed_before = _printed(), self._printed
        self._ticks, self._printed = ticks, printed
        if ticks - before >= _BUSY_TICKS_PER_S * since_s or printed != printed_before:
            return True
        since_s = now_mono - self._looked_at_all_mono
        if since_s < LOOK_AT_ALL_S:
            return False
        self._looked_at_all_mono = now_mono
        ticks, before = sum(map(_ticks, {self._pid, *below(self._pid)})), self._all_ticks
        self._all_ticks = ticks
        return abs(ticks - before) >= _BUSY_TICKS_PER_S * since_s  # the sum sinks when a process has ended


def below(pid: int) -> set[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    descendants: set[int] = set()
    waiting = [pid]
    while waiting:
        own = children.get(waiting.pop(), [])
        waiting += own
        descendants.update(own)
    return descendants


def _ticks(pid: int) -> int:
    """CPU time of a process and of its children that have ended; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))


def _printed() -> tuple[int, ...]:
    """Sizes of the files that the worker has in the place of its streams, which all processes write to."""
    return tuple(os.fstat(number).st_size for number in (1, 2))


if __name__ == "__main__":
    main()
