"""What a job waits for, until when, and who may start before it (EASY backfill).

The first job that does not fit has a reservation: the time at which the minima of enough running jobs have come free.
Another job starts before that time only if it ends before it, or takes what its nodes can spare at that time. Running
jobs are taken to end as early as they can and the other job as late as it can, so backfill delays no reserved start.
Called by `admission` and `waiting`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from shoal_service.core.scheduling.estimates import seconds_left
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.room import UNLIMITED, FreeNode, Shape, Sites, count


class Reservation:
    """A start that nothing may delay: what each node can spare until then, beside the minimum of the job."""

    def __init__(self, entry: Entry, shape: Shape, at: float, spare: dict[int, FreeNode]) -> None:
        self.entry = entry
        self.shape = shape
        """Where it is to start."""
        self.at = at
        self._spare = spare
        """By identity of the node: what is free there at that time. The others have what is free now."""

    def fits(self, free: FreeNode, need: WorkerNeed) -> int:
        """The number of such workers that the node can spare at that time."""
        spare = self._spare.get(id(free))
        return UNLIMITED if spare is None else spare.fits(need)

    def spend(self, need: WorkerNeed, sites: Sites) -> None:
        """What these workers take is not spare for the next."""
        for free, workers in sites:
            spare = self._spare.get(id(free))
            if spare is not None:
                spare.reserve(need, workers)


class Reservations:
    """The reservations of one decision: one for each set of nodes that no other uses."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._all: list[Reservation] = []
        self._at_most: dict[tuple[int, ...], tuple[int, int]] = {}
        """By shape and reservations: no more workers than this can be taken beside them, while none leave."""

    def take(self, entry: Entry, workers: int) -> Sites | Reservation | None:
        """Places for the workers that the job lacks; or the reservation that they would delay; or None: no room."""
        if not self._all:
            return entry.shape.take_all(workers)
        in_the_way = [reserved for reserved in self._all if self._holds_back(reserved, entry)]
        shape = entry.shape
        if not in_the_way:
            return shape.take_all(workers)
        key = (id(shape), *map(id, in_the_way))
        at_most, as_of = self._at_most.get(key, (UNLIMITED, 0))
        room = self._plan.room
        if shape.lacks(workers) or (workers > at_most and as_of == room.num_returns):
            return in_the_way[0]
        need = shape.need
        sites = shape.take_beside(workers, lambda free: min(reserved.fits(free, need) for reserved in in_the_way))
        if count(sites) < workers:
            room.give_back(shape, sites)
            self._at_most[key] = (count(sites), room.num_returns)
            return in_the_way[0]
        for reserved in in_the_way:
            reserved.spend(need, sites)
        return sites

    def _holds_back(self, reserved: Reservation, entry: Entry) -> bool:
        """If the job started now, it would still be there at the reserved time, and it has no higher priority."""
        job = entry.job
        if reserved.entry is entry or reserved.entry.job.priority < job.priority:
            return False
        if not reserved.shape.overlaps(entry.shape):
            return False
        return not self._plan.now + job.start_s + seconds_left(job, job.min_workers) <= reserved.at

    def reserve(self, entry: Entry, shapes: Sequence[Shape]) -> None:
        """The job fits into none of these: reserve its start where it is earliest, if no job before it has reserved on
        nodes that it may use."""
        if not any(reserved.shape.overlaps(shape) for reserved in self._all for shape in shapes):
            found = [self._reservation(entry, shape) for shape in shapes]
            self._all.append(min(found, key=lambda one: one.at))

    def _reservation(self, entry: Entry, shape: Shape) -> Reservation:
        """Its workers start where others end, so that what is free now stays spare."""
        need = shape.need
        missing = entry.job.min_workers - entry.target
        fits = shape.free(missing)
        at = self._plan.now
        spare: dict[int, FreeNode] = {}
        for ends, other in _earliest_ends(self._plan):
            if fits >= missing:
                break
            at = ends
            for free, workers in other.sites:
                if shape.may_use(free):
                    then = spare.setdefault(id(free), free.copy())
                    fits -= then.fits(need)
                    then.reserve(other.shape.need, -workers)
                    fits += then.fits(need)
        for free in (*(free for free in shape.nodes if id(free) in spare), *shape.nodes):
            if missing <= 0:
                break
            then = spare.setdefault(id(free), free.copy())
            workers = min(missing, then.fits(need))
            then.reserve(need, workers)
            missing -= workers
        return Reservation(entry, shape, at if missing <= 0 else math.inf, spare)


def _earliest_ends(plan: Plan) -> Iterator[tuple[float, Entry]]:
    """When running jobs end, by time, as if each had all of its workers; at once where the work is not known."""
    now = plan.now
    ends = [(now, entry.job.job_id, entry) for entry in plan.leaving if entry.floor]
    for entry in (*plan.running, *plan.queued):
        if entry.floor:
            job = entry.job
            at = now if job.left is None else now + entry.facts.ends(job)[0]
            ends.append((at if job.granted or job.left is None else at + job.start_s, job.job_id, entry))
    heapq.heapify(ends)  # the first few are enough as a rule
    while ends:
        at, _, entry = heapq.heappop(ends)
        yield at, entry


class Ends:
    """When running jobs end at their present rate, and how many workers of a shape then come free. Jobs of unknown
    length are left out."""

    def __init__(self, plan: Plan) -> None:
        now = plan.now
        ends = [(now, entry.job.job_id, entry) for entry in plan.leaving if entry.floor]
        for entry in (*plan.running, *plan.queued):
            job = entry.job
            if entry.floor and job.left is not None:
                at = now + entry.facts.ends(job)[1]
                ends.append((at if job.granted else at + job.start_s, job.job_id, entry))
        ends.sort()
        self._ends = ends

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
