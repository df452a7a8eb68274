"""The books of one decision: each job's target, the places that are booked for it, and what each project then has.

`decide` fills a Plan in three passes: what running jobs keep, who is admitted, who gets the rest. The plan decides
nothing. It hides what a booking changes: the nodes (`room`), the counts of projects, users and sweeps, and the order of
turns that follows from them.

What a project may have (`Share`), in workers:

    limit        never more, over the whole subtree of a project
    guaranteed   entitled to at least this many as soon as its jobs can use them
    the rest     hierarchical max-min: projects share by weight what others of their parent do not use (borrowing)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from shoal_service.core.scheduling.market import (
    AGED_AFTER_S,
    AGED_UNTIL_S,
    DEFAULT_PROJECT,
    DEFAULT_USER,
    MarketJob,
    MarketState,
    Project,
)
from shoal_service.core.scheduling.room import Room, Shape, Sites, count

PLACING_S = 30.0
"""New workers are on their nodes this many seconds after a grant. A job that still lacks some then has lost nodes."""

Precedence: TypeAlias = tuple[bool, int, tuple[float, ...]]
"""What decides a turn before the place in the queue, less first: whether the project has all that is guaranteed to it;
the negative priority; the project's share at each level from the root."""

_NONE: Sites = []
"""The sites of a job without places. Never changed in place: sites are replaced by longer lists."""


class Claim:
    """What all queued jobs with equal needs, project, user, sweep, priority, minimum and clusters ask for."""

    __slots__ = ("_precedence", "_precedence_as_of", "ever", "has_limits", "priority", "shape", "shapes", "share")

    def __init__(self, job: MarketJob, shapes: tuple[Shape, ...], share: Share, has_limits: bool) -> None:
        self.priority = job.priority
        self.shapes = shapes
        """The shape in each cluster in which the jobs may start, by name of the cluster."""
        self.shape = shapes[0]
        self.ever = max([shape.ever for shape in shapes])
        """Number of workers that fit into the empty nodes of the cluster that has room for most."""
        self.share = share
        self.has_limits = has_limits
        """Whether the project or one above it, the user or the sweep has limits."""
        self._precedence: Precedence = True, 0, ()
        self._precedence_as_of = -1

    def precedence(self, num_changes: int) -> Precedence:
        """The turn of the claim before the place in the queue decides; less is earlier.

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
        "floor",
        "job",
        "order",
        "owed",
        "shape",
        "share",
        "sites",
        "target",
    )

    def __init__(self, job: MarketJob, claim: Claim, now: float) -> None:
        self.job = job
        self.claim = claim
        self.shape = claim.shape
        """The shape in the cluster where the job has its workers, is to start, or where room was last looked for."""
        self.share = claim.share
        self.order = job.queue_place(now)
        self.target = 0
        """Number of workers that the job is to have."""
        self.charged = 0
        """Number of workers that count for the job's project before the rest is divided."""
        self.floor = 0
        """Number of workers that the job has before the rest is divided."""
        self.sites: Sites = _NONE
        """The nodes on which the job's workers are booked."""
        self.beneficiary: str | None = None
        """Id of the job for which this one is preempted; None if it is not preempted for another one."""
        self.aged = False
        """True if the job is preempted for one that has waited for long, or is that job itself."""
        self.owed: Share | None = None
        """The project that gets back what is guaranteed to it by preemption of this job, or for it; None if there is
        none."""
        self.donors: tuple[str, ...] = ()
        """Ids of the jobs that are preempted for this one."""

    def start_in(self, cluster: str) -> None:
        """Let the queued job start in this one of its clusters."""
        self.shape = next((shape for shape in self.claim.shapes if shape.cluster == cluster), self.shape)

    @property
    def is_below_minimum(self) -> bool:
        return self.target < self.job.min_workers


class Plan:
    """All jobs and nodes during one decision."""

    def __init__(self, state: MarketState, now: float) -> None:
        self.now = now
        self.room = Room(state.nodes)
        self.clusters = state.clusters
        self.known_clusters = state.clusters.keys() | set(self.room.clusters)
        self.has_clusters = len(self.known_clusters) > 1
        """Whether there are several clusters, so that words name them."""
        self.num_elastic: Counter[str] = Counter()
        """Number of jobs with places that can have more workers than their minimum, by cluster; counted only if there
        are several clusters."""
        self.shares = Shares(state.projects)
        self._users = state.users
        self.running_of_user: Counter[str] = Counter()
        self.running_of_sweep: Counter[tuple[str, str]] = Counter()
        """Number of jobs of each sweep with workers, by project and name of the sweep."""
        self.running: list[Entry] = []
        self.queued: list[Entry] = []
        self.leaving: list[Entry] = []
        self.aged: Entry | None = None
        """The one job that goes first, or keeps its minimum, because it has waited for long."""
        self.old: list[Entry] = []
        """Jobs that were submitted so long ago that they may have waited for long."""
        self.num_changes = 0
        """Number that grows whenever a job gets or loses places."""
        claims: dict[int, Claim] = {}
        """Claims by the Python id of their key, which is as a rule the same object for all that are equal."""
        runs_since, waits_since = now - AGED_UNTIL_S, now - AGED_AFTER_S
        for job in state.jobs:
            claim = claims.get(id(job.claim_key))
            if claim is None:
                claim = claims[id(job.claim_key)] = self._make_claim(job)
            entry = Entry(job, claim, now)
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

    def _make_claim(self, job: MarketJob) -> Claim:
        share = self.shares.find(job.project)
        has_limits = share.has_limits or job.sweep_limit is not None or self.max_running_of(job.user) is not None
        return Claim(job, self.room.choices(job), share, has_limits)

    def is_unplaced(self, entry: Entry) -> bool:
        """Return whether the job's workers were granted a moment ago and are on no node yet. They have room, though not
        where they are booked here, so no job is preempted for them."""
        job = entry.job
        moved_at = -math.inf if job.moved_at is None else job.moved_at
        return job.granted > 0 and not job.on_nodes and self.now - moved_at <= PLACING_S

    def max_running_of(self, user: str) -> int | None:
        """Most jobs with a grant that the user may have; None means any number."""
        if not user:
            return None
        limits = self._users.get(user) or self._users.get(DEFAULT_USER)
        return None if limits is None else limits.max_running

    def stay(self, entry: Entry, workers: int) -> Sites:
        """Take places for workers that run already: first on the nodes where they are known to be."""
        on_nodes = entry.job.on_nodes
        if not on_nodes or not entry.sites:
            return entry.shape.stay(workers, on_nodes)
        left = dict(on_nodes)
        for free, here in entry.sites:
            name = free.node.node_id
            left[name] = left.get(name, 0) - here
        return entry.shape.stay(workers, left)

    def keep(self, entry: Entry, sites: Sites, workers: int) -> None:
        """Let a running job keep these places, which are taken already. All of its workers count for its project, also
        those of lost nodes."""
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
        """Count `workers` workers of the job for its project, in place of those before."""
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


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a queued job does not start."""

    message: str | None
    """Why the job waits, for people; None if it waits for room."""
    share: Share | None = None
    """The project whose quota is in the way; None if no project's is."""
    user: str = ""
    """The user whose limit is in the way; empty: no user's is."""
    sweep: tuple[str, str] | None = None
    """The sweep whose limit is in the way, as (project, name); None if no sweep's is."""
    is_limit: bool = False
    """True if more nodes would not help."""
    behind: str | None = None
    """Id of the job whose reserved start this one would delay; None if it would delay none."""
    cluster: str = ""
    """The cluster in which it would delay that job."""


class Share:
    """One project during one decision."""

    def __init__(self, project: Project, parent: Share | None, changes: list[int]) -> None:
        """`changes`: a list of one number, shared by all projects. It grows whenever one of them gets or loses
        workers."""
        self.project = project
        self._changes = changes
        self._order: tuple[bool, tuple[float, ...]] = (True, ())
        self._ordered_at = -1
        """The value of `changes` for which `_order` was found."""
        self.path: tuple[Share, ...] = (self, *(parent.path if parent else ()))
        """This project and its ancestors."""
        self.has_limits = any(
            share.project.limit is not None or share.project.max_running is not None for share in self.path
        )
        self._limited = [share for share in self.path if share.project.limit is not None]
        self._levels = tuple((share, share.project.weight) for share in reversed(self.path))
        self._guaranteed = tuple((share, share.project.guaranteed) for share in self.path if share.project.guaranteed)
        self._capped = [share for share in self.path if share.project.max_running is not None]
        self.children: list[Share] = []
        self.used = 0
        self.running = 0
        self.demand = 0
        """Number of workers that the jobs of the subtree can use."""
        self.own_demand = 0
        self.entitled = math.inf
        """Number of workers that the jobs of this project, without its children, may have while others want theirs."""
        self.own_used = 0

    def add(self, workers: int, running: int = 0) -> None:
        self._changes[0] += 1
        self.own_used += workers
        for share in self.path:
            share.used += workers
            share.running += running

    def room(self) -> float:
        """Number of workers that the limits of the project and of its ancestors still allow."""
        if not self._limited:
            return math.inf
        return min((share.project.limit or 0) - share.used for share in self._limited)

    def tightest(self) -> Share:
        """The project on the path whose limit leaves the least room, or is exceeded most."""
        return min(self._limited, key=lambda share: (share.project.limit or 0) - share.used)

    def spare_beside(self, other: Share) -> float:
        """Number of workers that this project and its ancestors, as far as they are not the other's, can lose and still
        have what is guaranteed to them."""
        return min(
            (share.used - least for share, least in self._guaranteed if share not in other.path), default=math.inf
        )

    def owed(self, workers: int) -> Share | None:
        """The project, this one or an ancestor, to which `workers` more workers are still guaranteed; None if there is
        none."""
        for share, least in self._guaranteed:
            if share.used + workers <= least:
                return share
        return None

    @property
    def has_guarantee(self) -> bool:
        """True if something is guaranteed to the project or to an ancestor."""
        return bool(self._guaranteed)

    def full_of_jobs(self) -> Share | None:
        """The project on the path that has as many running jobs as it may; None if there is none."""
        for share in self._capped:
            if share.running >= (share.project.max_running or 0):
                return share
        return None

    def order(self) -> tuple[bool, tuple[float, ...]]:
        """Sort key of the project's turn, least first: projects below what is guaranteed to them, then the least used
        share at each level from the root."""
        if self._ordered_at != self._changes[0]:
            is_below = any(share.used < least for share, least in self._guaranteed)
            self._order = (not is_below, tuple([share.used / weight for share, weight in self._levels]))
            self._ordered_at = self._changes[0]
        return self._order


class Shares:
    """The tree of projects."""

    def __init__(self, projects: Mapping[str, Project]) -> None:
        self._projects = projects
        self._shares: dict[str, Share] = {}
        self._changes = [0]

    def find(self, name: str) -> Share:
        """The share of a project; projects that are not listed have the default project's."""
        known = self._shares.get(name)
        if known is not None:
            return known
        name = name if name in self._projects else DEFAULT_PROJECT
        share = self._shares.get(name)
        if share is None:
            project = self._projects.get(name) or Project(name=name)
            parent = self.find(project.parent) if project.parent and self._is_below(name, project.parent) else None
            share = self._shares[name] = Share(project, parent, self._changes)
            if parent is not None:
                parent.children.append(share)
        return share

    def _is_below(self, name: str, parent: str) -> bool:
        """Return whether the project is below this parent: the parent is listed, and its ancestors do not lead back to
        the project."""
        seen = {name}
        above: str | None = parent
        while above is not None:
            # a cycle, or an ancestor that is not listed, which ends the path
            if above in seen or above not in self._projects:
                return above not in seen and above != parent
            seen.add(above)
            above = self._projects[above].parent
        return True

    @property
    def all(self) -> list[Share]:
        return list(self._shares.values())

    def entitle(self, capacity: int) -> None:
        """Divide the capacity by max-min fairness with what each project can use."""
        for share in self._shares.values():
            share.demand = 0
        for share in self._shares.values():
            for ancestor in share.path:
                ancestor.demand += share.own_demand
        roots = [share for share in self._shares.values() if len(share.path) == 1]
        for share, entitled in zip(roots, divide(capacity, [_claim(share) for share in roots]), strict=True):
            _entitle_below(share, entitled)


def _entitle_below(share: Share, entitled: int) -> None:
    if not share.children:
        share.entitled = entitled
        return
    claims = [_claim(child) for child in share.children]
    own_share, *parts = divide(entitled, [(1.0, 0, share.own_demand), *claims])
    share.entitled = own_share
    for child, part in zip(share.children, parts, strict=True):
        _entitle_below(child, part)


def _claim(share: Share) -> tuple[float, int, int]:
    limit = share.project.limit
    most = share.demand if limit is None else min(share.demand, limit)
    return share.project.weight, min(share.project.guaranteed, most), most


def divide(capacity: int, claims: list[tuple[float, int, int]]) -> list[int]:
    """Divide whole workers by weighted max-min fairness. A claim is (weight, guaranteed, most).

    What is guaranteed comes first (less in proportion if it exceeds the capacity); the rest raises the claims with the
    least per weight, until each has its most. Exact in O(claims log claims) by the level at which claims are filled.
    """
    floors = [floor for _, floor, _ in claims]
    if sum(floors) > capacity:
        claims = [(max(floor, 1e-9), 0, floor) for floor in floors]
    low, high = 0.0, max((most / weight for weight, _, most in claims), default=0.0)
    if sum(most for _, _, most in claims) <= capacity:
        return [most for _, _, most in claims]

    def at(level: float) -> list[float]:
        return [min(float(most), max(float(floor), level * weight)) for weight, floor, most in claims]

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) <= capacity else (low, middle)
    exact = at(low)
    whole = [int(part + 1e-6) for part in exact]
    by_fraction = sorted(range(len(claims)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_fraction[: capacity - sum(whole)]:
        whole[i] += whole[i] < claims[i][2]
    return whole
