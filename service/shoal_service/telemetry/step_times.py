"""StepTimes: the histogram of a job's step times, over all its attempts. Only grows.

The store adds the steps of each report in the transaction that stores them, so that each is counted once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

STEP_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the buckets, seconds; the last bucket is above all of them."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS_S) + 1)
    """Steps per bucket."""
    total_s: float = 0.0

    def add(self, times_s: Iterable[float]) -> StepTimes:
        counts, total_s = list(self.counts), self.total_s
        for step_s in times_s:
            counts[bisect_left(STEP_BOUNDS_S, step_s)] += 1
            total_s += step_s
        return StepTimes(tuple(counts), total_s)

    def text(self) -> str:
        """The times as text, for one column of the job's row."""
        return " ".join([*map(str, self.counts), repr(self.total_s)])

    @classmethod
    def read(cls, text: str) -> StepTimes:
        """Empty, or made by a release with other buckets: counted from zero."""
        *counts, total_s = text.split() or ["0"]
        if len(counts) != len(STEP_BOUNDS_S) + 1:
            return cls()
        return cls(tuple(map(int, counts)), float(total_s))
