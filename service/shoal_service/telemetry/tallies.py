"""Counts and durations of this process, kept in memory from its start on. Thread-safe.

Prometheus expects that such counters begin at 0 with the process. What must outlive it is counted in the store.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter

from shoal_service.telemetry.metric import Histogram, Labels, Metric


class Count:
    """A counter, by labels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Labels] = Counter()

    def add(self, *labels: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[labels] += amount

    def values(self) -> dict[Labels, int]:
        with self._lock:
            return dict(sorted(self._counts.items()))

    def value(self, *labels: str) -> int:
        with self._lock:
            return self._counts[labels]


class Durations:
    """A histogram of seconds, by labels."""

    def __init__(self, metric: Metric) -> None:
        self._bounds = metric.buckets
        self._lock = threading.Lock()
        self._counts: dict[Labels, list[int]] = {}
        self._totals: dict[Labels, float] = {}

    def observe(self, seconds: float, *labels: str) -> None:
        """Seconds on a bound belong to it."""
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * (len(self._bounds) + 1))
            counts[bisect_left(self._bounds, seconds)] += 1
            self._totals[labels] = self._totals.get(labels, 0.0) + seconds

    def values(self) -> dict[Labels, Histogram]:
        with self._lock:
            rows = [(labels, tuple(counts), self._totals[labels]) for labels, counts in sorted(self._counts.items())]
        return {labels: Histogram.of_buckets(counts, total) for labels, counts, total in rows}

    def value(self) -> Histogram:
        """Value of a histogram without labels; all zeros if it has observed nothing."""
        return self.values().get((), Histogram((0,) * len(self._bounds), 0, 0.0))
