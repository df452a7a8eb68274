"""Processes that read data: forked by the training thread, and killed by the kernel with their rank.

    of a task     forked once, before there is a model or a group; they serve all generations of the worker
                  (`step/batch_readers.py`)
    of a loop     forked while the loop runs, ended when it is left: those that were let go have 0.1 s; then SIGTERM
                  ends them at once; after 0.5 s SIGKILL (`loop/samples.py`, `loop/streams.py`)

A fork, because the data set of a program exists in its memory only: a new interpreter cannot import what the program's
`__main__` defines. A process that is forked while a group runs also holds the rank's sockets open. As long as it
lives, the death of its rank shows on no connection, so it must not outlive the rank, and must be gone before the group
is left.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

_ASKED_S = 0.1
_TERMINATED_S = 0.5
_PR_SET_PDEATHSIG = 1


class _Process(ForkProcess):
    """Dies with the process that has forked it."""

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent is None or os.getppid() != parent.pid:  # it died before
            os._exit(1)
        super().run()


class _Context(ForkContext):
    Process = _Process


CONTEXT = _Context()
"""For `multiprocessing_context` of a DataLoader. The kernel ends a process with the thread that has forked it, so fork
on a thread that lives as long as the processes are needed."""


class DataProcesses:
    """The child processes of one call of a loop, also those that its own loaders have started. Training thread only."""

    def __init__(self) -> None:
        self._others = {process.pid for process in multiprocessing.active_children()}

    def let_go(self, iterators: list[Any]) -> None:
        """Empties the list, which has the only references to iterators of DataLoaders: their processes end when they
        have read what they are reading."""
        # An iterator that is dropped waits up to 5 s for each process, and for ever if one is killed while it holds a
        # lock that they share. So that is done by a thread for which nobody waits.
        threading.Thread(target=iterators.clear, name="shoal-data-end", daemon=True).start()

    def end(self) -> None:
        """Ends all of them, also in the middle of a sample. Never raises."""
        started_mono = time.monotonic()
        left = [process for process in multiprocessing.active_children() if process.pid not in self._others]
        for end, until_s in ((None, _ASKED_S), ("terminate", _TERMINATED_S), ("kill", None)):
            for process in left if end else ():
                getattr(process, str(end))()
            for process in left:
                process.join(None if until_s is None else max(0.0, started_mono + until_s - time.monotonic()))
            left = [process for process in left if process.exitcode is None]
            if not left:
                return
