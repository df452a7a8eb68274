"""SystemSampler: collects what the workers of a group measure, and makes the mean of each rank every ten seconds.

The reporter adds each poll's measurement once, and asks for a sample whenever it shows the status. A new generation
begins with nothing, because its ranks may be other workers.
"""

from __future__ import annotations

from shoal_service.core.system_metrics import SystemSample, pace_s, sample_of
from shoal_workers.contract.messages import WorkerUse

_MOST_PER_SAMPLE = 64
"""Measurements of a rank that one sample is the mean of; further ones are dropped."""


class SystemSampler:
    """Called on the executor's loop only."""

    def __init__(self) -> None:
        self._uses: dict[int, list[WorkerUse]] = {}
        self._newest: dict[int, float] = {}
        """Time of the newest measurement of each worker, by worker index: polls repeat it."""
        self._generation = 0
        self._due_mono = 0.0

    def add(self, index: int, rank: int | None, use: WorkerUse, generation: int) -> None:
        """Adds a measurement of the worker `index`, which has this rank in this generation; None: it has none."""
        if generation != self._generation:
            self._generation, self._uses = generation, {}
        if self._newest.get(index) == use.at:
            return
        self._newest[index] = use.at
        if rank is not None:
            uses = self._uses.setdefault(rank, [])
            if len(uses) < _MOST_PER_SAMPLE:
                uses.append(use)

    def take(self, num_ranks: int, *, now: float, now_mono: float) -> SystemSample | None:
        """The sample of the interval that has ended; None: it has not ended, or nothing was measured."""
        if now_mono < self._due_mono or not self._uses or not num_ranks:
            return None
        self._due_mono = now_mono + pace_s(num_ranks)
        sample = sample_of(self._uses, num_ranks=num_ranks, generation=self._generation, at=now)
        self._uses = {}
        return sample if sample.values else None
