"""Whom an urgent job displaces: running jobs of lower priority, as few as it takes. Called by `admission`.

A job that lost nodes and no longer has its minimum does not train, so it also gives way to a job of its own priority.
The job that has waited for long (`plan.aged`) displaces others whatever their priority, and no job displaces it.
A job that has waited RECLAIM_AFTER_S for what is guaranteed to its project displaces jobs of its own priority, too, if
they are of projects that have more than is guaranteed to them. What it gets is not taken back in the same way, because
neither project is then below its guarantee for the jobs of the other.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import NamedTuple, TypeAlias

from shoal_service.core.scheduling.market import MarketJob
from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.room import Shape, Sites
from shoal_service.core.scheduling.shares import Share

RECLAIM_AFTER_S = 60.0
"""A borrower of equal priority keeps its minimum for this long, since another one may end or be shrunk meanwhile."""

MANY = 100
"""From this many victims on, they are sorted with the others rather than inserted one by one."""

_Ranked: TypeAlias = tuple[float, float, str, Entry]


class Preemption:
    """The running jobs in the order in which they would be preempted: lowest priority and latest in the queue first."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        latest_first = (*plan.queued, *reversed(plan.running))  # nearly sorted already
        self._victims = sorted([_ranked(entry) for entry in latest_first if entry.target])
        self._added: list[Entry] = []
        """Victims that are not in order yet: most jobs are admitted before anybody is displaced."""
        self._least_added = math.inf
        """Their lowest priority."""
        self._failed: dict[tuple[int, Share, Share | None], tuple[float, int]] = {}
        """Priority and workers of the last claim of a shape and a project, for what is owed to a project, that could
        not be met. What others may lose to it depends on the project."""

    def add(self, entry: Entry) -> None:
        """The job has been admitted in this decision; a job of higher priority may still displace it."""
        self._added.append(entry)
        if entry.job.priority < self._least_added:
            self._least_added = entry.job.priority

    def may_help(self, claimant: Entry, missing: int) -> bool:
        """Some job has a lower priority, or the same one if workers are owed to the claimant's project."""
        least = min(self._victims[0][0] if self._victims else math.inf, self._least_added)
        priority = self._priority(claimant)
        return least < priority or (least == priority and self._owed_to(claimant, missing) is not None)

    def _put_in_order(self) -> None:
        if len(self._added) > MANY:
            self._victims += map(_ranked, self._added)
            self._victims.sort()
        else:
            for entry in self._added:
                insort(self._victims, _ranked(entry))
        self._added.clear()
        self._least_added = math.inf

    def _priority(self, claimant: Entry) -> float:
        return math.inf if claimant is self._plan.aged else claimant.job.priority

    def _owed_to(self, claimant: Entry, missing: int) -> Share | None:
        """The project that gets what is guaranteed to it back from others by this claim."""
        return claimant.share.owed(missing) if has_waited(claimant.job, self._plan.now) else None

    def harm(self, claimant: Entry, missing: int) -> tuple[float, int] | None:
        """The highest priority among the jobs that `make_room` would preempt, and the workers that would count less for
        their projects; None: it cannot. Nothing has changed afterwards."""
        cleared = self._make_room(claimant, missing)
        if not cleared:
            return None
        for victim in reversed(cleared):
            self._put_back(victim)
        return max([victim.ranked[0] for victim in cleared]), sum([victim.charged for victim in cleared])

    def make_room(self, claimant: Entry, missing: int) -> list[Entry]:
        """Preempts until `workers` workers fit. Empty if that cannot be done, and then nothing has changed."""
        priority, owed = self._priority(claimant), self._owed_to(claimant, missing)
        cleared = self._make_room(claimant, missing)
        for victim in cleared:
            del self._victims[bisect_left(self._victims, victim.ranked)]
            victim.entry.beneficiary = claimant.job.job_id
            victim.entry.aged = claimant.aged = claimant is self._plan.aged
            if victim.ranked[0] == priority:
                victim.entry.owed = claimant.owed = owed
        entries = [victim.entry for victim in cleared]
        claimant.donors = (*claimant.donors, *(entry.job.job_id for entry in entries if entry.job.granted))
        return entries

    def _make_room(self, claimant: Entry, missing: int) -> list[_Victim]:
        """Take the places of as few jobs as it takes. Empty: none was taken."""
        if not self.may_help(claimant, missing):
            return []
        priority, owed = self._priority(claimant), self._owed_to(claimant, missing)
        failed = self._failed.get((id(claimant.shape), claimant.share, owed))
        if failed is not None and priority <= failed[0] and missing >= failed[1]:
            return []
        self._put_in_order()
        cleared = self._clear(claimant, missing, owed)
        if not cleared and claimant is not self._plan.aged:
            # The failure of a job that has waited for long says nothing of other projects, whose guarantees differ.
            self._failed[id(claimant.shape), claimant.share, owed] = (priority, missing)
        return cleared

    def _clear(self, claimant: Entry, missing: int, owed: Share | None) -> list[_Victim]:
        cleared: list[_Victim] = []
        shape, share, most = claimant.shape, claimant.share, self._priority(claimant)
        spare: dict[Share, float] = {}
        """What each project has beyond what is guaranteed to it, as of the last job that was cleared."""
        for ranked in self._victims:
            entry = ranked[-1]
            if ranked[0] >= most and (owed is None or ranked[0] > most):
                break
            if ranked[0] == most and owed in entry.share.path:
                continue
            beyond = spare.get(entry.share)
            if beyond is None:
                beyond = spare[entry.share] = entry.share.spare_beside(share)
            if entry.charged > beyond or entry in (claimant, self._plan.aged) or not entry.shape.overlaps(shape):
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


def has_waited(job: MarketJob, now: float) -> bool:
    """Whether the job has waited so long that it may displace borrowers of its own priority."""
    return now - (job.submitted_at if job.moved_at is None else job.moved_at) >= RECLAIM_AFTER_S


def _ranked(entry: Entry) -> _Ranked:
    job = entry.job
    priority: float = job.priority
    if entry.target < job.granted and entry.target < job.min_workers:
        priority -= 0.5  # it lost nodes and does not train
    return priority, -entry.order[0], job.job_id, entry
