"""Compares whole copies with the replay of their step, now and then: a difference is corruption.

A copy and its replay were made from the same numbers by two machines, so all bits must be equal. Which of the two is
wrong cannot be known from them. Called by the server, after it has received a copy; the engine reads what is found.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from shoal_workers.snapshot_store.log.replay import Replayer, ReplayFailed

COMPARED_EVERY = 8
"""Copies of one rank: a comparison costs about as many updates as there are steps between two copies."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """The copy of a rank's state after a step differs from its replay in these tensors."""

    generation: int
    rank: int
    step: int
    names: tuple[str, ...]


class Comparison:
    """Any thread."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self._lock = threading.Lock()
        self._num_copies: Counter[tuple[int, int]] = Counter()
        self._compared: set[tuple[int, int]] = set()
        self._found: deque[Difference] = deque()

    @contextmanager
    def of_copy(self, generation: int, rank: int) -> Iterator[bool]:
        """Around the receipt of a whole copy: whether it shall be compared. Meanwhile `needs_entries` of this rank."""
        with self._lock:
            self._num_copies[generation, rank] += 1
            is_due = self._num_copies[generation, rank] % COMPARED_EVERY == 2  # the first that follows another one
            if is_due:
                self._compared.add((generation, rank))
        try:
            yield is_due
        finally:
            with self._lock:
                self._compared.discard((generation, rank))

    def needs_entries(self, generation: int, rank: int) -> bool:
        """Entries of this rank must not be overwritten now."""
        return (generation, rank) in self._compared

    def run(self, generation: int, rank: int, step: int, check: Callable[[], None]) -> None:
        """On a thread of its own, since it may take long; lowers the thread's priority."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            names = self._replayer.differing(generation, rank, step, check)
        except ReplayFailed as error:
            _log.warning("snapshot_store.comparison_failed", extra={"error": str(error)})
            return
        if names:
            self._found.append(Difference(generation, rank, step, names))

    def take(self) -> Difference | None:
        """The next difference that was found; None: there is none."""
        return self._found.popleft() if self._found else None
