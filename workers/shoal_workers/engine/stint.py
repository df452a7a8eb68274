"""A process's time in one generation, as the control thread sees it: can be woken for as long as it lasts.

The sweeper is a thread that wakes the training thread every 20 ms until it has left. It exists only after an interrupt,
and is joined before the next generation begins, so it can never touch a socket of the next one.
"""

from __future__ import annotations

import threading

from shoal_workers.engine.group import Group

_SWEEP_S = 0.02


class Stint:
    """Made and left by the training thread, woken by the control thread."""

    def __init__(self, generation: int, group: Group) -> None:
        self.generation = generation
        self.group = group
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
        while True:
            self.group.wake()
            if self._left.wait(_SWEEP_S):
                return
