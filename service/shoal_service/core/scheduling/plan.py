"""The working copy of one decision: each job's target, the nodes that are booked for it, and its project's share.

`decide` fills it in three passes: what running jobs keep, who is admitted, who gets the rest. It decides nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from operator import attrgetter
from typing import TypeAlias

from shoal_service.core.scheduling.estimates import AGED_AFTER_S, AGED_UNTIL_S
from shoal_service.core.scheduling.facts import Facts, facts_of
from shoal_service.core.scheduling.market import DEFAULT_USER, MarketJob, MarketState
from shoal_service.core.scheduling.room import Room, Shape, Sites, count
from shoal_service.core.scheduling.shares import Share, Shares

PLACING_S = 30.0
"""New workers are on their nodes after this time. A job that still lacks some has lost nodes."""

Precedence: TypeAlias = tuple[bool, int, tuple[float, ...]]
"""The project has all that is guaranteed to it; the priority, negative; the project's share at each level."""

_NONE: Sites = []
"""Never changed: sites are replaced by longer lists."""


class Claim:
    """What queued jobs with equal needs, project, user, sweep, priority, minimum and clusters ask for."""

    __slots__ = ("_precedence", "_precedence_as_of", "ever", "has_limits", "priority", "shape", "shapes", "share")

    def __init__(self, job: MarketJob, shapes: tuple[Shape, ...], share: Share, has_limits: bool) -> None:
        self.priority = job.priority
        self.shapes = shapes
        """Shapes in each cluster in which they may start, by name."""
        self.shape = shapes[0]
        self.ever = max([shape.ever for shape in shapes])
        """Workers that fit into the empty nodes of the cluster that has room for most."""
        self.share = share
        self.has_limits = has_limits
        """Whether its project or one above it, its user or its sweep has limits."""
        self._precedence: Precedence = True, 0, ()
        self._precedence_as_of = -1

    def precedence(self, num_changes: int) -> Precedence:
        """Whose turn it is before the place in the queue decides: less is earlier.

        `num_changes` is the plan's: the claims of thousands of jobs are compared while nothing changes.
        """
        if self._precedence_as_of != num_changes:
            borrows, used = self.share.order()
            self._precedence = borrows, -self.priority, used
            self._precedence_as_of = num_changes
        return self._precedence


class Entry:
    """A job during one decision."""

    __slots__ = (
        "aged",
        "beneficiary",
        "charged",
        "claim",
        "donors",
        "facts",
        "floor",
        "job",
        "order",
        "owed",
        "shape",
        "share",
        "sites",
        "target",
    )

    def __init__(self, job: MarketJob, facts: Facts, claim: Claim, now: float) -> None:
        self.job = job
        self.facts = facts
        self.claim = claim
        self.shape = claim.shape
        """In the cluster where it has its workers, is to start, or was last looked for room."""
        self.share = claim.share
        self.order = facts.order(now)
        self.target = 0
        """Workers that it is to have."""
        self.charged = 0
        """Workers that count for its project before the rest is divided."""
        self.floor = 0
        """Workers that it has before the rest is divided."""
        self.sites: Sites = _NONE
        """Where its floor is booked."""
        self.beneficiary: str | None = None
        """The job for which it is preempted."""
        self.aged = False
        """It is preempted for a job that has waited for long, or it is that job."""
        self.owed: Share | None = None
        """The project that gets what is guaranteed to it by preemption, of this job or for it."""
        self.donors: tuple[str, ...] = ()
        """Jobs that are preempted for it."""

    def start_in(self, cluster: str) -> None:
        """The queued job is to start in this one of its clusters."""
        self.shape = next((shape for shape in self.claim.shapes if shape.cluster == cluster), self.shape)

    @property
    def is_below_minimum(self) -> bool:
        return self.target < self.job.min_workers


class Plan:
    """All jobs and nodes during one decision."""

    def __init__(self, state: MarketState, now: float) -> None:
        self.now = now
        self.room = Room(state.nodes, now)
        self.clusters = state.clusters
        self.known_clusters = state.clusters.keys() | set(self.room.clusters)
        self.has_clusters = len(self.known_clusters) > 1
        """There are several, so words name them."""
        self.num_elastic: Counter[str] = Counter()
        """By cluster, where there are several: jobs with places that can have more workers than their minimum."""
        self.shares = Shares(state.projects)
        self._users = state.users
        self.running_of_user: Counter[str] = Counter()
        self.running_of_sweep: Counter[tuple[str, str]] = Counter()
        """By project and name."""
        self.running: list[Entry] = []
        self.queued: list[Entry] = []
        self.leaving: list[Entry] = []
        self.aged: Entry | None = None
        """The one job that goes first, or keeps its minimum, because it has waited for long."""
        self.old: list[Entry] = []
        """Jobs that were submitted so long ago that they may have waited for long."""
        self.num_changes = 0
        """Grows whenever a job gets or loses places."""
        claims: dict[int, Claim] = {}
        """By identity of the key, which is as a rule the same object for all that are equal."""
        runs_since, waits_since = now - AGED_UNTIL_S, now - AGED_AFTER_S
        for job in state.jobs:
            facts = job.memo or facts_of(job)
            claim = claims.get(id(facts.claim_key))
            if claim is None:
                claim = claims[id(facts.claim_key)] = self._claim(job, facts)
            entry = Entry(job, facts, claim, now)
            if job.is_leaving:
                self.leaving.append(entry)
                continue
            if job.submitted_at <= (runs_since if job.granted else waits_since):
                self.old.append(entry)
            if job.granted > 0:
                self.running.append(entry)
            else:
                self.queued.append(entry)
        for entries in (self.queued, self.running):  # by `order`; times alone are compared faster than pairs
            entries.sort(key=attrgetter("job.job_id"))
            entries.sort(key=lambda entry: entry.order[0])
        self.running.sort(
            key=attrgetter("job.priority"), reverse=True
        )  # stable: in the queue's order within a priority

    def _claim(self, job: MarketJob, facts: Facts) -> Claim:
        share = self.shares.of(job.project)
        has_limits = share.has_limits or job.sweep_limit is not None or self.max_running_of(job.user) is not None
        return Claim(job, self.room.choices(job, facts), share, has_limits)

    def is_unplaced(self, entry: Entry) -> bool:
        """Its workers were granted a moment ago and are on no node yet. They have room, though not where they are
        booked here, so no job is preempted for them."""
        job = entry.job
        moved_at = -math.inf if job.moved_at is None else job.moved_at
        return job.granted > 0 and not job.on_nodes and self.now - moved_at <= PLACING_S

    def max_running_of(self, user: str) -> int | None:
        """Jobs with a grant that the user may have; None: any number."""
        if not user:
            return None
        found = self._users.get(user) or self._users.get(DEFAULT_USER)
        return None if found is None else found.max_running

    def stay(self, entry: Entry, workers: int) -> Sites:
        """Places for workers that run already: first on the nodes where they are known to be."""
        on_nodes = entry.job.on_nodes
        if not on_nodes or not entry.sites:
            return entry.shape.stay(workers, on_nodes)
        left = dict(on_nodes)
        for free, here in entry.sites:
            name = free.node.node_id
            left[name] = left.get(name, 0) - here
        return entry.shape.stay(workers, left)

    def keep(self, entry: Entry, sites: Sites, workers: int) -> None:
        """A running job keeps these places. All of its workers count for its project, also those of lost nodes."""
        here = count(sites)
        self.num_changes += 1
        entry.sites = sites
        entry.target = entry.floor = here
        self.charge(entry, workers if workers > here else here)

    def book(self, entry: Entry, sites: Sites) -> None:
        """Give these places to the job."""
        self.num_changes += 1
        entry.sites = entry.sites + sites if entry.sites else sites
        entry.target += count(sites)
        entry.floor = entry.target
        if entry.target > entry.charged:
            self.charge(entry, entry.target)

    def clear(self, entry: Entry) -> None:
        """Take all of its places from the job."""
        self.num_changes += 1
        self.room.give_back(entry.shape, entry.sites)
        self.charge(entry, 0)
        entry.sites = _NONE
        entry.target = entry.floor = 0

    def charge(self, entry: Entry, workers: int) -> None:
        """Counts `workers` workers of the job for its project."""
        before = entry.charged
        if workers == before:
            return
        entry.charged = workers
        running = (workers > 0) - (before > 0)
        entry.share.add(workers - before, running)
        if running and self.has_clusters and entry.job.max_workers > entry.job.min_workers and not entry.job.is_leaving:
            self.num_elastic[entry.shape.cluster] += running
        if running and entry.job.user:
            self.running_of_user[entry.job.user] += running
        if running and entry.job.sweep:
            self.running_of_sweep[entry.job.project, entry.job.sweep] += running
