"""RemovalTallies: what this process has deleted of jobs. Written by `control/retention.py`."""

from __future__ import annotations

from shoal_service.core.retention import Kind
from shoal_service.telemetry.tallies import Count


class RemovalTallies:
    """What retention has removed in one process, by kind; thread-safe."""

    def __init__(self) -> None:
        self.counts = Count()
        for kind in Kind:
            self.counts.add(kind.value, amount=0)  # `increase()` sees the first one only after a 0

    def removed(self, kind: Kind, number: int = 1) -> None:
        """Counts what was removed; `number` counts rows for logs, series and events."""
        self.counts.add(kind.value, amount=number)
