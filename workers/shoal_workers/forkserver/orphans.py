"""Ends what a worker leaves behind when it ends, however it ends: its children, also those in sessions of their own.

    fork server, or guardian     adopts orphans; ends every child of its own that is no worker
      == worker                  adopts orphans too: what its children leave behind is its own while it lives
           -- children of the task, in any session and process group

The kernel gives an orphan to the nearest ancestor that adopts (PR_SET_CHILD_SUBREAPER, see prctl(2)). Workers adopt, so
a process that reaches the fork server was left by a worker that has ended. A worker that is an interpreter of its own
has a guardian: a small process that waits for it. Imports the standard library only.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

from shoal_workers.forkserver.launch import wait_for

SWEEP_S = 0.05
"""Pause between two calls of `end_orphans` while there are some."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """From now on, orphans below this process become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(workers: Collection[int] = ()) -> bool:
    """Kill and reap the children of this process other than `workers`. True: call it again, because there were some,
    and what they leave behind becomes a child of this process."""
    orphans = children() - {*workers}
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(orphans)


def below_guardian() -> None:
    """Return in a new process. This one waits for it, ends what it has left, and exits with its status. Call it while
    the process has one thread.

    The children that this process has already are not left by the new one: the fork server is one of them if this was
    the first launcher of the node, and all workers of the node are below it.
    """
    guardian = os.getpid()
    earlier = children()
    adopt_orphans()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guardian:  # it died before
            os._exit(1)
        adopt_orphans()
        return
    wait_for(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    while end_orphans(earlier):
        time.sleep(SWEEP_S)
    sys.exit(code if code >= 0 else 128 - code)


def children() -> set[int]:
    own_pid = os.getpid()
    return {pid for pid, parent in parents().items() if parent == own_pid}


def parents() -> dict[int, int]:
    """Return the parent of each process of this machine, by pid."""
    parents_by_pid = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  (pathlib takes longer to import)
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                parents_by_pid[int(name)] = int(file.read().rpartition(b") ")[2].split()[1])
    return parents_by_pid
