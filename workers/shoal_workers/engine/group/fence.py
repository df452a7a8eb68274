"""What the control thread has told the training thread: up to which generation it is fenced, and where to yield.

Two integers that only grow. Generations only grow too, so a late or repeated message can do no harm. Reading them costs
nothing: the training thread looks at the fence several times in each step.
"""

from __future__ import annotations

import threading


class Fence:
    """Thread-safe; generations count from 0."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fenced_to = -1
        self._yield_to = -1
        self._durable_to = -1

    def raise_to(self, generation: int) -> None:
        """Every generation up to this one is over."""
        with self._lock:
            self._fenced_to = max(self._fenced_to, generation)

    def ask_yield(self, generation: int, *, durable: bool) -> None:
        """Every generation up to this one shall stop at its next step boundary; `durable`: with a checkpoint of it."""
        with self._lock:
            self._yield_to = max(self._yield_to, generation)
            if durable:
                self._durable_to = max(self._durable_to, generation)

    def is_fenced(self, generation: int) -> bool:
        return generation <= self._fenced_to

    def is_yield_asked(self, generation: int) -> bool:
        return generation <= self._yield_to

    def is_durable_asked(self, generation: int) -> bool:
        return generation <= self._durable_to
