"""Which of several clusters a queued job starts in: where its minimum does the least harm, then where it can grow most.

    1 harm     workers that jobs there have above their minima and would give; none where enough are free
    2 growth   what is above the minima there, divided among the jobs there that can use it, with this one
    3 name     the first

A job that cannot grow takes no account of growth where it shrinks no job: small jobs fill one cluster and leave room
for large ones in the next. The numbers are of workers like the job's, and rough where workers or nodes differ; whether
the minimum fits is decided by the caller, node by node. Called by `admission`; it books nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.room import Shape


class ClusterChoice:
    """The choice of clusters in one decision. Counts are kept up to date by `booked`, and made again after other
    changes."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._as_of = -1
        self._above: dict[int, float] = {}
        """By identity of the shape: workers of it for which there is room beside the minima."""
        self._free: dict[int, float] = {}
        """By identity of the shape: workers of it for which there is room beside all that jobs have."""
        self._shapes: list[Shape] = []
        """Those that were counted."""

    def ranked(self, entry: Entry, missing: int, shapes: Sequence[Shape]) -> list[Shape]:
        """Best first. The job's minimum fits into each of them beside the minima of others."""
        if self._as_of != self._plan.num_changes:
            self._above.clear()
            self._free.clear()
            self._shapes.clear()
            self._as_of = self._plan.num_changes
        can_grow = entry.job.max_workers > entry.job.min_workers

        def order(shape: Shape) -> tuple[float, float, str]:
            if id(shape) not in self._above:
                self._count(shape)
            harm = max(0.0, missing - max(0.0, self._free[id(shape)]))
            growth = (self._above[id(shape)] - missing) / (1 + self._plan.num_elastic[shape.cluster])
            return harm, -growth if can_grow or harm else 0.0, shape.cluster

        return sorted(shapes, key=order)

    def booked(self, entry: Entry, workers: int) -> None:
        """Notes that the job has just been given places for `workers` workers, and that nothing else has changed."""
        if self._as_of != self._plan.num_changes - 1:
            return
        self._as_of = self._plan.num_changes
        for shape in self._shapes:
            if shape.overlaps(entry.shape):
                taken = workers * shape.per_worker(entry.shape)[0]
                self._above[id(shape)] -= taken
                self._free[id(shape)] -= taken

    def _count(self, shape: Shape) -> None:
        above = shape.free()
        surplus = 0.0
        for entry in self._plan.running:
            if entry.job.granted > entry.target > 0 and entry.shape.overlaps(shape):
                surplus += (entry.job.granted - entry.target) * shape.per_worker(entry.shape)[0]
        self._above[id(shape)] = above
        self._free[id(shape)] = above - surplus
        self._shapes.append(shape)
