"""Whom an urgent job displaces: running jobs of lower priority, as few as it takes. Called by `admission`.

A job that lost nodes and no longer has its minimum does not train, so it also gives way to a job of its own priority.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple, TypeAlias

from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.room import Shape, Sites
from shoal_service.core.scheduling.shares import Share

MANY = 100
"""So many victims are sorted with the others rather than inserted one by one."""

_Ranked: TypeAlias = tuple[float, float, str, Entry]


class Preemption:
    """The running jobs in the order in which they would be preempted: lowest priority and latest in the queue first."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        latest_first = (*plan.queued, *reversed(plan.running))  # nearly sorted already
        self._victims = sorted([_ranked(entry) for entry in latest_first if entry.target])
        self._added: list[Entry] = []
        """Victims that are not in order yet: most jobs are admitted before anybody asks for one."""
        self._failed: dict[int, tuple[float, int]] = {}
        """Priority and workers of the last claim of a shape that preemption could not meet."""

    def add(self, entry: Entry) -> None:
        """The job has been admitted in this decision; a job of higher priority may still displace it."""
        self._added.append(entry)

    def may_help(self, priority: int) -> bool:
        """Some job has a lower priority."""
        if len(self._added) > MANY:
            self._victims += map(_ranked, self._added)
            self._victims.sort()
        else:
            for entry in self._added:
                insort(self._victims, _ranked(entry))
        self._added.clear()
        return bool(self._victims) and self._victims[0][0] < priority

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
        for victim in cleared:
            del self._victims[bisect_left(self._victims, victim.ranked)]
            victim.entry.beneficiary = claimant.job.job_id
        entries = [victim.entry for victim in cleared]
        claimant.donors = (*claimant.donors, *(entry.job.job_id for entry in entries if entry.job.granted))
        return entries

    def _clear(self, claimant: Entry, missing: int) -> list[_Victim]:
        cleared: list[_Victim] = []
        shape, share, most = claimant.shape, claimant.share, claimant.job.priority
        spare: dict[Share, float] = {}
        """What each project has beyond what is guaranteed to it, as of the last job that was cleared."""
        for ranked in self._victims:
            entry = ranked[-1]
            if ranked[0] >= most:
                break
            beyond = spare.get(entry.share)
            if beyond is None:
                beyond = spare[entry.share] = entry.share.spare_beside(share)
            if entry.charged > beyond or entry is claimant or not entry.shape.overlaps(shape):
                continue
            cleared.append(_Victim(ranked, entry, entry.sites, entry.charged))
            self._plan.clear(entry)
            spare.clear()
            if not shape.lacks(missing):
                return self._spare(shape, missing, cleared)
        for victim in reversed(cleared):
            self._put_back(victim)
        return []

    def _spare(self, shape: Shape, missing: int, cleared: list[_Victim]) -> list[_Victim]:
        """Leave out the jobs whose workers are not needed after all, those of the highest priority first."""
        taken = [cleared.pop()]  # there was no room without the last one
        for victim in reversed(cleared):
            self._put_back(victim)
            if shape.lacks(missing):
                self._plan.clear(victim.entry)
                taken.append(victim)
        return taken

    def _put_back(self, victim: _Victim) -> None:
        entry = victim.entry
        for free, workers in victim.sites:
            free.reserve(entry.job.need, workers)
        self._plan.keep(entry, victim.sites, victim.charged)


class _Victim(NamedTuple):
    """A job whose places were taken away, and what it takes to give them back."""

    ranked: _Ranked
    entry: Entry
    sites: Sites
    charged: int


def _ranked(entry: Entry) -> _Ranked:
    job = entry.job
    priority: float = job.priority
    if entry.target < job.granted and entry.target < job.min_workers:
        priority -= 0.5  # it lost nodes and does not train
    return priority, -entry.order[0], job.job_id, entry
