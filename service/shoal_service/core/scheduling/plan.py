"""The working copy of one decision: each job's target, the nodes that are booked for it, and its project's share.

`decide` fills it in three passes: what running jobs keep, who is admitted, who gets the rest. It decides nothing.
"""

from __future__ import annotations

from collections import Counter

from shoal_service.core.scheduling.estimates import queue_time, worker_seconds_left
from shoal_service.core.scheduling.market import MarketJob, MarketState
from shoal_service.core.scheduling.room import Room, Shape, Sites, count
from shoal_service.core.scheduling.shares import Share, Shares


class Entry:
    """A job during one decision."""

    __slots__ = (
        "beneficiary",
        "charged",
        "donors",
        "floor",
        "job",
        "order",
        "shape",
        "share",
        "sites",
        "target",
        "work_s",
    )

    def __init__(self, job: MarketJob, shape: Shape, share: Share) -> None:
        self.job = job
        self.shape = shape
        self.share = share
        self.work_s = worker_seconds_left(job)
        self.order = (queue_time(job, self.work_s), job.job_id)
        self.target = 0
        """Workers that it is to have."""
        self.charged = 0
        """Workers that count for its project before the rest is divided."""
        self.floor = 0
        """Workers that it has before the rest is divided."""
        self.sites: Sites = []
        """Where its floor is booked."""
        self.beneficiary: str | None = None
        """The job for which it is preempted."""
        self.donors: tuple[str, ...] = ()
        """Jobs that are preempted for it."""

    @property
    def is_below_minimum(self) -> bool:
        return self.target < self.job.min_workers


class Plan:
    """All jobs and nodes during one decision."""

    def __init__(self, state: MarketState, now: float) -> None:
        self.now = now
        self.room = Room(state.nodes, now)
        self.shares = Shares(state.projects)
        self.max_running_per_user = state.max_running_per_user
        self.running_of_user: Counter[str] = Counter()
        self.running: list[Entry] = []
        self.queued: list[Entry] = []
        self.leaving: list[Entry] = []
        for job in state.jobs:
            entry = Entry(job, self.room.shape(job), self.shares.of(job.project))
            if job.is_leaving:
                self.leaving.append(entry)
            elif job.granted > 0:
                self.running.append(entry)
            else:
                self.queued.append(entry)
        self.queued.sort(key=lambda entry: entry.order)
        self.running.sort(key=lambda entry: (-entry.job.priority, entry.order))

    def stay(self, entry: Entry, workers: int) -> Sites:
        """Places for workers that run already: first on the nodes where they are known to be."""
        left = dict(entry.job.on_nodes)
        for free, here in entry.sites if left else ():
            name = free.node.node_id
            left[name] = left.get(name, 0) - here
        return entry.shape.stay(workers, left)

    def keep(self, entry: Entry, sites: Sites, workers: int) -> None:
        """A running job keeps these places. All of its workers count for its project, also those of lost nodes."""
        self._charge(entry, workers)
        self.book(entry, sites)

    def book(self, entry: Entry, sites: Sites) -> None:
        """Give these places to the job."""
        entry.sites = entry.sites + sites
        entry.target += count(sites)
        entry.floor = entry.target
        self._charge(entry, max(0, entry.target - entry.charged))

    def clear(self, entry: Entry) -> None:
        """Take all of its places from the job."""
        self.room.give_back(entry.job.need, entry.sites)
        self._charge(entry, -entry.charged)
        entry.sites = []
        entry.target = entry.floor = 0

    def _charge(self, entry: Entry, workers: int) -> None:
        before = entry.charged
        entry.charged += workers
        running = int(entry.charged > 0) - int(before > 0)
        entry.share.add(workers, running)
        if entry.job.user:
            self.running_of_user[entry.job.user] += running
