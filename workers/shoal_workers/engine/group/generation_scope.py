"""A worker's time in one generation, as the control thread sees it: the training thread can be woken until it has left.

The sweeper is a thread that wakes the training thread every 20 ms until it has left. It exists only after an interrupt,
and is joined before the next generation begins, so it can never touch a socket of the next one. If waking does not
help, it logs the training thread's stack, because nothing can ask the worker later: it is about to be killed.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from shoal_workers.engine.group.process_group import Group

_SWEEP_S = 0.02
_STUCK_S = 1.0
"""Waking takes some tens of milliseconds; after the supervisor's `quiesce_s` the worker is killed."""


class GenerationScope:
    """Created and left by the training thread, woken by the control thread.

    Args:
        log: writes a line into the job's log; called on any thread.
    """

    def __init__(self, generation: int, group: Group, log: Callable[[str], None]) -> None:
        self.generation = generation
        self.group = group
        self._log = log
        self._training_thread_id = threading.get_ident()
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._sweeper: threading.Thread | None = None

    def wake_until_left(self) -> None:
        """Idempotent; returns at once."""
        with self._lock:
            if self._sweeper is None and not self._left.is_set():
                self._sweeper = threading.Thread(target=self._sweep, name="shoal-sweeper", daemon=True)
                self._sweeper.start()

    def leave(self) -> None:
        """After this call no thread touches the group's sockets any more."""
        with self._lock:
            self._left.set()
        if self._sweeper is not None:
            self._sweeper.join()

    def _sweep(self) -> None:
        stuck_at = time.monotonic() + _STUCK_S
        is_logged = False
        while True:
            self.group.wake()
            if self._left.wait(_SWEEP_S):
                return
            if not is_logged and time.monotonic() > stuck_at:
                is_logged = True
                self._log_where_it_is_stuck()

    def _log_where_it_is_stuck(self) -> None:
        connections = ", ".join(self.group.connections()) or "none"
        self._log(f"cannot be woken out of generation {self.generation}; open connections of the group: {connections}")
        frame = sys._current_frames().get(self._training_thread_id)
        for line in "".join(traceback.format_stack(frame)).splitlines() if frame is not None else ():
            self._log(line)
