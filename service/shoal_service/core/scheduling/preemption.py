"""Whom an urgent job displaces: running jobs of lower priority, as few as it takes. Called by `admission`.

A job that lost nodes and no longer has its minimum does not train, so it also gives way to a job of its own priority.
"""

from __future__ import annotations

from bisect import insort

from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.room import Shape, Sites
from shoal_service.core.scheduling.shares import Share


class Preemption:
    """The running jobs in the order in which they would be preempted: lowest priority and latest in the queue first."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        latest_first = (*plan.queued, *reversed(plan.running))  # nearly sorted already
        self._victims = sorted([_ranked(entry) for entry in latest_first if entry.target])
        self._gone: set[int] = set()
        """Victims that have been preempted."""
        self._failed: dict[int, tuple[float, int]] = {}
        """Priority and workers of the last claim of a shape that preemption could not meet."""

    def add(self, entry: Entry) -> None:
        """The job has been admitted in this decision; a job of higher priority may still displace it."""
        insort(self._victims, _ranked(entry))

    def may_help(self, priority: int) -> bool:
        """Some job has a lower priority."""
        victims = self._victims
        while victims and id(victims[0][-1]) in self._gone:
            del victims[0]
        return bool(victims) and victims[0][0] < priority

    def make_room(self, claimant: Entry, missing: int) -> list[Entry]:
        """Preempt until so many workers fit. Empty if that cannot be done, and then nothing has changed."""
        priority = claimant.job.priority
        if not self.may_help(priority):
            return []
        failed = self._failed.get(id(claimant.shape))
        if failed is not None and priority <= failed[0] and missing >= failed[1]:
            return []
        cleared = self._clear(claimant, missing)
        if not cleared:
            self._failed[id(claimant.shape)] = (priority, missing)
            return []
        for entry in cleared:
            self._gone.add(id(entry))
            entry.beneficiary = claimant.job.job_id
        claimant.donors = (*claimant.donors, *(entry.job.job_id for entry in cleared if entry.job.granted))
        return cleared

    def _clear(self, claimant: Entry, missing: int) -> list[Entry]:
        cleared: list[tuple[Entry, Sites, int]] = []
        shape, share = claimant.shape, claimant.share
        spare: dict[Share, float] = {}
        """What each project has beyond what is guaranteed to it, as of the last job that was cleared."""
        for priority, _, _, entry in self._victims:
            if priority >= claimant.job.priority:
                break
            if entry is claimant or id(entry) in self._gone:
                continue
            if entry.share not in spare:
                spare[entry.share] = entry.share.spare_beside(share)
            if entry.charged > spare[entry.share] or not entry.shape.overlaps(shape):
                continue
            cleared.append((entry, entry.sites, entry.charged))
            self._plan.clear(entry)
            spare.clear()
            if not shape.lacks(missing):
                return self._spare(shape, missing, cleared)
        for entry, sites, charged in reversed(cleared):
            self._put_back(entry, sites, charged)
        return []

    def _spare(self, shape: Shape, missing: int, cleared: list[tuple[Entry, Sites, int]]) -> list[Entry]:
        """Leave out the jobs whose workers are not needed after all, those of the highest priority first."""
        taken = [cleared[-1][0]]  # without the last one there was no room
        for entry, sites, charged in reversed(cleared[:-1]):
            self._put_back(entry, sites, charged)
            if shape.lacks(missing):
                self._plan.clear(entry)
                taken.append(entry)
        return taken

    def _put_back(self, entry: Entry, sites: Sites, charged: int) -> None:
        for free, workers in sites:
            free.reserve(entry.job.need, workers)
        self._plan.keep(entry, sites, charged)


def _ranked(entry: Entry) -> tuple[float, float, str, Entry]:
    job = entry.job
    priority: float = job.priority
    if entry.target < job.granted and entry.target < job.min_workers:
        priority -= 0.5  # it lost nodes and does not train
    return priority, -entry.order[0], job.job_id, entry
