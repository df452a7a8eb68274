"""Sentences about a task for the job's log: each once per worker, and those of rank 0 only.

While a worker prepares it has no rank, so what is remarked then waits for its first generation. Called by `UserCode`
and by the engine.
"""

from __future__ import annotations

from collections.abc import Callable


class Remarks:
    """Training thread only."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: list[str] = []

    def add(self, text: str) -> None:
        """Keep it, unless it is known."""
        if text not in self._known:
            self._known.add(text)
            self._waiting.append(text)

    def say(self, rank: int, log: Callable[[str], None]) -> None:
        """Log what was added since the last call, if this is rank 0."""
        waiting, self._waiting = self._waiting, []
        if rank == 0:
            for text in waiting:
                log(text)
