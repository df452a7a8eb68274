"""A process's time in one generation, as the control thread sees it: can be woken for as long as it lasts.

The sweeper is a thread that wakes the training thread every 20 ms until it has left. It exists only after an interrupt,
and is joined before the next generation begins, so it can never touch a socket of the next one. Where waking does not
help it says what the training thread does instead, since the process will not be asked: it is about to be killed.
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
"""Waking takes some tens of milliseconds; after the supervisor's `quiesce_s` the process is killed."""


class GenerationScope:
    """Made and left by the training thread, woken by the control thread. `tell`: any thread; a line for the log."""

    def __init__(self, generation: int, group: Group, tell: Callable[[str], None]) -> None:
        self.generation = generation
        self.group = group
        self._tell = tell
        self._trains = threading.get_ident()
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
        """After it nobody touches the group's sockets any more."""
        with self._lock:
            self._left.set()
        if self._sweeper is not None:
            self._sweeper.join()

    def _sweep(self) -> None:
        stuck_at = time.monotonic() + _STUCK_S
        is_told = False
        while True:
            self.group.wake()
            if self._left.wait(_SWEEP_S):
                return
            if not is_told and time.monotonic() > stuck_at:
                is_told = True
                self._say_where()

    def _say_where(self) -> None:
        connections = ", ".join(self.group.connections()) or "none"
        self._tell(f"cannot be woken out of generation {self.generation}; open connections of the group: {connections}")
        frame = sys._current_frames().get(self._trains)
        for line in "".join(traceback.format_stack(frame)).splitlines() if frame is not None else ():
            self._tell(line)
