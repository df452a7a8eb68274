"""What a job waits for, until when, and who may start before it (EASY backfill).

The first job that does not fit has a reservation: the time at which the minima of enough running jobs have come free.
Another job starts before that time only if it ends before it, or needs workers that are spare at that time. Running
jobs are taken to end as early as they can and the other job as late as it can, so backfill delays no reserved start.
Called by `admission` and `waiting`.
"""

from __future__ import annotations

import math
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
            ends = self._plan.now + job.start_s + seconds_left(job, job.min_workers)
            if ends <= reserved.at and math.isfinite(reserved.at):
                continue
            if reserved.entry.job.need == job.need and job.min_workers <= reserved.spare:
                continue
            return reserved
        return None

    def spend(self, entry: Entry) -> None:
        """The job has started: what it takes of the spare workers is not spare for the next."""
        for reserved in self._all:
            job = entry.job
            ends = self._plan.now + job.start_s + seconds_left(job, job.min_workers)
            if reserved.entry.shape.overlaps(entry.shape) and not ends <= reserved.at:
                reserved.spare -= job.min_workers

    def reserve(self, entry: Entry) -> None:
        """The job does not fit: reserve its start, if no job before it has reserved on its nodes."""
        if not any(reserved.entry.shape.overlaps(entry.shape) for reserved in self._all):
            self._all.append(self._reservation(entry))

    def _reservation(self, entry: Entry) -> Reservation:
        free = entry.shape.free() + entry.target
        for ends, workers, _ in timeline(self._plan, entry.shape, earliest=True):
            free += workers
            if free >= entry.job.min_workers:
                return Reservation(entry, ends, free - entry.job.min_workers)
        return Reservation(entry, math.inf, 0)


def timeline(plan: Plan, shape: Shape, *, earliest: bool) -> list[tuple[float, int, str]]:
    """When running jobs end and how many workers of this shape then come free, by time.

    Earliest: as if each had all of its workers, and at once where the work is not known. Otherwise at their present
    rate, without the jobs of unknown length.
    """
    ends: list[tuple[float, int, str]] = []
    for entry in (*plan.leaving, *plan.running, *plan.queued):
        job = entry.job
        if not entry.floor or not (entry.shape is shape or entry.shape.overlaps(shape)):
            continue
        if job.is_leaving:
            at = plan.now
        elif job.left is None:
            if not earliest:
                continue
            at = plan.now
        else:
            wait_s = 0.0 if job.granted else job.start_s
            left_s = job.left / max(job.curve.rates) if earliest else seconds_left(job, job.granted or entry.floor)
            at = plan.now + wait_s + left_s
        ends.append((at, _in_shape(entry, shape), job.job_id))
    ends.sort()
    return ends


def _in_shape(entry: Entry, shape: Shape) -> int:
    """The workers of the shape that fit in place of the job's minimum; not exact where they differ in kind."""
    need, other = entry.job.need, shape.need
    if need == other:
        return entry.floor
    ratios = [
        have / want
        for have, want in ((need.cpus, other.cpus), (need.gpus, other.gpus), (need.memory_gib, other.memory_gib))
        if want > 0
    ]
    return int(entry.floor * min(ratios, default=1.0))
