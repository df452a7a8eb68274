"""What a job waits for, until when, and who may start before it (EASY backfill).

The first job that does not fit has a reservation: the time at which the minima of enough running jobs have come free.
Another job starts before that time only if it ends before it, or needs workers that are spare at that time. Running
jobs are taken to end as early as they can and the other job as late as it can, so backfill delays no reserved start.
Called by `admission` and `waiting`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal_service.core.scheduling.estimates import seconds_left
from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.room import Shape


@dataclass(slots=True)
class Reservation:
    """A start that nothing may delay."""

    entry: Entry
    at: float
    spare: int
    """Workers that are free at that time beyond the minimum of the job."""


class Reservations:
    """The reservations of one decision: one for each set of nodes that no other uses."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._all: list[Reservation] = []

    def holder_of(self, entry: Entry) -> Reservation | None:
        """The reservation that the job's start would delay."""
        for reserved in self._all:
            if reserved.entry is entry or not reserved.entry.shape.overlaps(entry.shape):
                continue
            job = entry.job
            if math.isfinite(reserved.at) and self._ends_at(entry) <= reserved.at:
                continue
            if job.min_workers <= reserved.spare and reserved.entry.shape.is_alike(entry.shape):
                continue
            return reserved
        return None

    def spend(self, entry: Entry) -> None:
        """The job has started: what it takes of the spare workers is not spare for the next."""
        for reserved in self._all:
            if reserved.entry.shape.overlaps(entry.shape) and not self._ends_at(entry) <= reserved.at:
                reserved.spare -= entry.job.min_workers

    def _ends_at(self, entry: Entry) -> float:
        """When the job ends at the latest if it starts now."""
        return self._plan.now + entry.job.start_s + seconds_left(entry.job, entry.job.min_workers)

    def reserve(self, entry: Entry) -> None:
        """The job does not fit: reserve its start, if no job before it has reserved on its nodes."""
        if not any(reserved.entry.shape.overlaps(entry.shape) for reserved in self._all):
            self._all.append(self._reservation(entry))

    def _reservation(self, entry: Entry) -> Reservation:
        free = entry.shape.free() + entry.target
        for ends, workers, _ in Ends(self._plan, earliest=True).of(entry.shape):
            free += workers
            if free >= entry.job.min_workers:
                return Reservation(entry, ends, free - entry.job.min_workers)
        return Reservation(entry, math.inf, 0)


class Ends:
    """When running jobs end, and how many workers of a shape then come free.

    Earliest: as if each had all of its workers, and at once where the work is not known. Otherwise at their present
    rate, without the jobs of unknown length.
    """

    def __init__(self, plan: Plan, *, earliest: bool) -> None:
        which = 0 if earliest else 1
        now = plan.now
        self._ends: list[tuple[float, str, Entry]] = []
        for entry in (*plan.leaving, *plan.running, *plan.queued):
            if not entry.floor:
                continue
            job = entry.job
            at = now
            if not job.is_leaving:
                if job.left is not None:
                    at += entry.facts.ends(job)[which]
                    if not job.granted:
                        at += job.start_s
                elif not earliest:
                    continue
            self._ends.append((at, job.job_id, entry))
        self._ends.sort()

    def of(self, shape: Shape) -> Iterator[tuple[float, int, str]]:
        """By time; workers that differ from the shape's count as about as many as fit in their place."""
        factors: dict[int, float] = {}
        for at, job_id, entry in self._ends:
            factor = factors.get(id(entry.shape))
            if factor is None:
                overlaps = entry.shape.overlaps(shape)
                factor = factors[id(entry.shape)] = shape.per_worker(entry.shape)[0] if overlaps else -1.0
            if factor >= 0:
                yield at, entry.floor if factor == 1.0 else int(entry.floor * factor), job_id
