"""The market as data: what a scheduling policy reads and returns. Jobs, nodes, projects; start, resize, preempt, wait.

    control loop (store + cluster)  \
                                      ->  MarketState  ->  policy(state, now)  ->  decisions  ->  carried out
    simulator (trace + capacity)    /

A policy is a pure function. It returns one decision for every queued job and for every running job that changes.
Decisions are named tuples: thousands are made in a pass, and a frozen dataclass takes several times as long.

Here is also what follows from one job alone: its length, its place in the queue, the workers that its deadline needs.
The control loop passes the same MarketJob again as long as the job has not changed, and what is derived from it is kept
with that value, so a decision derives it only for jobs that are new or have trained since the last one. A decision is
the same whether a number was kept or derived again. Every estimate uses the job's measured curve. The control loop sees
from `MarketJob.fingerprint` what has changed; the submission answers with `describe_missed` if a deadline is too early.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from shoal_service.core.quantities import count_text, duration_text
from shoal_workers.contract import CapacityKind as CapacityKind
from shoal_workers.contract import Placement as Placement

DEFAULT_PROJECT = "default"
DEFAULT_USER = "default"

SWITCH_S = 0.3
"""Seconds without training at a change of the number of workers, until they were measured on the cluster: the median of
docs/measured/layouts.md."""
START_S = 4.3
"""Seconds from a grant to the end of the first step, until they were measured on the cluster: what
`bench/market/urgent_start.py` has measured for four workers that others give by shrinking (docs/scheduling.md)."""

PRIORITY_DOUBLES = 50.0
"""This many points of priority double a job's weight. A priority is about who starts. If it weighed more on what is
above the minimum, an urgent job that is long would take the workers of many short ones."""

PRIOR_WORKER_S = 600.0
"""Least work, in worker-seconds, that is expected to remain of a job of unknown length. Job lengths are heavy-tailed,
so a job that has received more than this is expected to need as much again (Tiresias, NSDI 2019)."""

SECONDS_PER_PRIORITY = 360.0
"""A point of priority counts as much in the queue as this many seconds of waiting, so no priority is overtaken for
ever."""

LENGTH_SHARE = 2.0
"""A job may be overtaken by shorter ones that are submitted within this many times its own length after it."""

MAX_OVERTAKEN_S = 4 * 3600.0
"""A job is not overtaken by jobs that are submitted more than this many seconds after it. Both limits were chosen with
`bench/schedule`; docs/scheduling.md has the comparison."""

AGED_AFTER_S = 24 * 3600.0
"""A queued job that was without workers for this much longer than with them goes first, whatever its priority."""

AGED_UNTIL_S = 12 * 3600.0
"""A job that went first keeps its minimum until it was without workers for only this much longer than with them."""

DEADLINE_MARGIN_S = 600.0
"""A job with a deadline is to start this long before the last moment at which it could make the deadline."""

ShapeKey: TypeAlias = tuple[float, float, float, CapacityKind, Placement, frozenset[tuple[str, str]]]

ClaimKey: TypeAlias = tuple[str, str, str, int | None, int, int, str, frozenset[str], ShapeKey]

_NO_LABELS: frozenset[tuple[str, str]] = frozenset()
_NO_CLUSTERS: frozenset[str] = frozenset()

Segment: TypeAlias = tuple[int, float]
"""World size at the end of a segment of the hull, and samples per second that each worker of the segment adds."""


@dataclass(frozen=True, slots=True)
class ThroughputCurve:
    """Training rates of a job at some world sizes. Measured curves need not rise everywhere."""

    sizes: tuple[int, ...]
    """World sizes in rising order; at least one, and each at least 1."""
    rates: tuple[float, ...]
    """Samples per second at each of these sizes; each is positive."""

    def __post_init__(self) -> None:
        assert self.sizes and len(self.sizes) == len(self.rates), "one rate per world size"
        assert self.sizes[0] >= 1 and all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        assert all(rate > 0 for rate in self.rates)

    @staticmethod
    def linear(rate: float = 1.0, most: int = 2) -> ThroughputCurve:
        """A curve of perfect scaling up to `most` workers: what is assumed of a job of which nothing is known."""
        return ThroughputCurve((1, max(2, most)), (rate, rate * max(2, most)))

    def rate(self, workers: int) -> float:
        """Samples per second with this number of workers.

        Linear between two known sizes, proportional below the smallest, constant above the largest.
        """
        if workers == self.sizes[0]:
            return self.rates[0]
        if workers <= 0:
            return 0.0
        at = bisect_left(self.sizes, workers)
        if at == len(self.sizes):
            return self.rates[-1]
        if self.sizes[at] == workers:
            return self.rates[at]
        if at == 0:
            return self.rates[0] * workers / self.sizes[0]
        low, high = self.sizes[at - 1], self.sizes[at]
        share = (workers - low) / (high - low)
        return self.rates[at - 1] * (1 - share) + self.rates[at] * share


@lru_cache(maxsize=65536)
def hull(curve: ThroughputCurve, least: int, most: int) -> tuple[Segment, ...]:
    """The upper concave hull of the curve between two sizes, as segments of falling gain, up to its highest rate."""
    corners: list[tuple[int, float]] = [(least, curve.rate(least))]
    sizes = {size for size in curve.sizes if least < size < most}
    for size in sorted(sizes | {most} if most > least else sizes):
        rate = curve.rate(size)
        while len(corners) > 1 and _gain(corners[-2], corners[-1]) <= _gain(corners[-1], (size, rate)):
            corners.pop()
        corners.append((size, rate))
    return tuple(
        (after[0], _gain(before, after)) for before, after in pairwise(corners) if after[1] > before[1] * (1 + 1e-9)
    )


def _gain(before: tuple[int, float], after: tuple[int, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeed:
    """What one worker reserves on one node."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_gib: float = 0.0

    def describe(self) -> str:
        parts = [(self.cpus, "CPU"), (self.gpus, "GPU"), (self.memory_gib, "GiB")]
        return " + ".join(f"{amount:g} {unit}" for amount, unit in parts if amount) or "nothing"

    def plus(self, other: WorkerNeed, times: int = 1) -> WorkerNeed:
        return WorkerNeed(
            cpus=self.cpus + times * other.cpus,
            gpus=self.gpus + times * other.gpus,
            memory_gib=self.memory_gib + times * other.memory_gib,
        )


@dataclass(frozen=True, kw_only=True)
class MarketJob:
    """A job that is queued (`granted` is 0) or has a grant. Times are wall-clock seconds, as `now`."""

    job_id: str
    submitted_at: float
    min_workers: int
    max_workers: int
    need: WorkerNeed
    project: str = DEFAULT_PROJECT
    user: str = ""
    """User to whom the job counts; empty: no limits of a user apply."""
    sweep: str = ""
    """Name of the job's sweep in its project; empty: it is in none."""
    sweep_limit: int | None = None
    """The job starts only while fewer jobs of its sweep than this have workers; None means no limit."""
    priority: int = 0
    granted: int = 0
    """Number of workers that the job may use; 0: it is queued."""
    held: int = 0
    """Number of workers that the job still has: more than `granted` while it gives some back."""
    on_nodes: Mapping[str, int] = field(default_factory=dict)
    """Number of the job's workers by node id, where known: they may stay on a cordoned node."""
    curve: ThroughputCurve = field(default_factory=ThroughputCurve.linear)
    """Predicted throughput, corrected by what was measured."""
    is_measured: bool = True
    """False if the curve is only predicted: no expected start relies on it while the job runs."""
    left: float | None = None
    """Samples that remain; None means unknown."""
    done: float = 0.0
    """Samples that the job has trained."""
    served_s: float = 0.0
    """Worker-seconds that the job has received so far."""
    moved_at: float | None = None
    """When `granted` last changed; None means never."""
    switch_s: float = SWITCH_S
    """Seconds without training at each change of the number of workers; measured if possible."""
    start_s: float = START_S
    """Seconds from a grant to the first step if the job is queued; measured if possible."""
    finish_by: float | None = None
    """Wall-clock time of the deadline that the user has set; None if there is none."""
    capacity: CapacityKind = CapacityKind.ANY
    selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have, all of them, to be used by the job."""
    placement: Placement = Placement.PACK
    cluster: str = ""
    """For a job with a grant, the cluster where it runs. For a queued job, the only one in which it may start; empty:
    any."""
    excluded_clusters: frozenset[str] = frozenset()
    """For a queued job, the clusters in which it may not start, because its checkpoints are not known to be reachable
    there."""
    is_leaving: bool = False
    """True if the job is leaving: it pauses, is cancelled or moves, or its cluster does not answer. It keeps its
    workers until it is gone, and gets no more."""

    @cached_property
    def claim_key(self) -> ClaimKey:
        """Key of the job's claim: equal for queued jobs that ask for the same, and then as a rule the same object."""
        need = self.need
        return _claim_key(
            *(self.project, self.user, self.sweep, self.sweep_limit, self.priority, self.min_workers, self.cluster),
            _NO_CLUSTERS if self.granted else self.excluded_clusters,
            *(need.cpus, need.gpus, need.memory_gib, self.capacity, self.placement),
            frozenset(self.selector.items()) if self.selector else _NO_LABELS,
        )

    @property
    def shape_key(self) -> ShapeKey:
        """Key of the job's shape: equal for jobs whose workers are alike and may use the same nodes of a cluster."""
        return self.claim_key[-1]

    @cached_property
    def fingerprint(self) -> tuple[object, ...]:
        """Everything about the job that decisions depend on, except its progress."""
        return (
            *(self.job_id, self.granted, self.held, self.max_workers, self.finish_by, self.is_leaving),
            self.claim_key,
        )

    @cached_property
    def work_s(self) -> float:
        """Work that remains, in seconds of one worker: how jobs with different samples are compared by length.

        The rate of a worker is that at the job's smallest size, where it is most efficient as a rule.
        """
        if self.left is None:
            return max(PRIOR_WORKER_S, self.served_s)
        return self.left / (self.curve.rate(self.min_workers) / self.min_workers)

    @cached_property
    def latest_start(self) -> float:
        """The last moment at which the job could get its best number of workers and still make its deadline; infinite
        without a deadline, or if the work is not known."""
        if self.finish_by is None or self.left is None:
            return math.inf
        pause_s = self.switch_s if self.granted else self.start_s
        return self.finish_by - pause_s - min(seconds_left(self, size) for size in known_sizes(self))

    @cached_property
    def _undated_place(self) -> tuple[float, str]:
        """Virtual time of submit, without a deadline: the queue is in this order. It never changes while a job waits.

        Shorter jobs and higher priorities are earlier. Since each bonus is bounded, only jobs that are submitted within
        a bounded time after a job can overtake it.
        """
        at = self.submitted_at + min(MAX_OVERTAKEN_S, LENGTH_SHARE * self.work_s / self.min_workers)
        return at - SECONDS_PER_PRIORITY * self.priority, self.job_id

    def queue_place(self, now: float) -> tuple[float, str]:
        """Place in the queue; less is earlier. A deadline counts as long as it can be met. Here too no priority is
        overtaken for ever: a deadline that can still be met is not long before the submission."""
        if self.finish_by is None or now > self.latest_start:
            return self._undated_place
        by_deadline = self.latest_start - DEADLINE_MARGIN_S - SECONDS_PER_PRIORITY * self.priority
        return min(self._undated_place, (by_deadline, self.job_id))

    @cached_property
    def division(self) -> tuple[tuple[Segment, ...], float]:
        """The hull of the job's curve from its minimum on, and the weight of one sample per second before the weight by
        length: the priority's weight, relative to the job's rate per worker at its minimum."""
        weight = 2.0 ** (self.priority / PRIORITY_DOUBLES) * self.min_workers / self.curve.rate(self.min_workers)
        return hull(self.curve, self.min_workers, self.max_workers), weight

    @cached_property
    def seconds_to_end(self) -> tuple[float, float]:
        """Seconds to the job's end with its best number of workers, and with those that it has (its minimum, if it has
        none); infinite if the work is not known."""
        if self.left is None:
            return math.inf, math.inf
        return self.left / max(self.curve.rates), self.left / self.curve.rate(self.granted or self.min_workers)


@lru_cache(maxsize=16_384)
def _claim_key(
    project: str,
    user: str,
    sweep: str,
    sweep_limit: int | None,
    priority: int,
    min_workers: int,
    cluster: str,
    excluded_clusters: frozenset[str],
    cpus: float,
    gpus: float,
    memory_gib: float,
    capacity: CapacityKind,
    placement: Placement,
    labels: frozenset[tuple[str, str]],
) -> ClaimKey:
    """The key of a claim. It is cached, because thousands of jobs ask for the same: one key for all of them is less to
    build and to compare."""
    shape_key = cpus, gpus, memory_gib, capacity, placement, labels
    return project, user, sweep, sweep_limit, priority, min_workers, cluster, excluded_clusters, shape_key


def seconds_left(job: MarketJob, workers: int) -> float:
    """Seconds to the end with this many workers; infinite if the work is not known, or without workers."""
    rate = job.curve.rate(workers)
    return math.inf if job.left is None or rate <= 0 else job.left / rate


def starved_s(job: MarketJob, now: float) -> float:
    """Seconds by which the job was longer without workers than with them. A worker beyond the minimum counts as more
    time with workers."""
    return now - job.submitted_at - 2 * job.served_s / job.min_workers


def known_sizes(job: MarketJob) -> list[int]:
    """The job's smallest and largest size, and the sizes between them that its curve has. One of them is the
    fastest."""
    between = [size for size in job.curve.sizes if job.min_workers < size < job.max_workers]
    return [job.min_workers, *between, job.max_workers]


def workers_for_deadline(job: MarketJob, now: float) -> int:
    """The smallest size with which the job ends in time; 0 without a deadline, or if no size does."""
    if job.finish_by is None or job.left is None:
        return 0
    most = job.finish_by - now - (job.start_s if job.granted == 0 else job.switch_s)
    for size in range(job.min_workers, job.max_workers + 1) if job.max_workers <= 64 else known_sizes(job):
        if seconds_left(job, size) <= most:
            return size
    # It cannot be met. Then it has no weight, here or in the queue: others would give up workers for nothing.
    return 0


def describe_missed(job: MarketJob, now: float) -> str | None:
    """Why the deadline cannot be met even if the job gets all of its workers at once; None if it can, or is not
    known."""
    if job.finish_by is None or job.left is None or workers_for_deadline(job, now):
        return None
    best = max(known_sizes(job), key=lambda size: (job.curve.rate(size), -size))
    needs = job.start_s + seconds_left(job, best)
    return (
        f"finish_by is in {duration_text(job.finish_by - now)}, but with {count_text(best, 'worker')} it takes "
        f"{duration_text(needs)}. Set a later finish_by, or a larger elasticity.max_workers ({job.max_workers} now)."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketNode:
    """A node that is alive and may be used by at least some jobs."""

    node_id: str
    cpus: float
    gpus: float = 0.0
    memory_gib: float = 0.0
    """Memory of the node. The three resources are its totals, less what others than Shoal's jobs have reserved
    there."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that node selectors compare; `gpu_type` is one of them."""
    cluster: str = ""
    """Name of the node's Ray cluster. All workers of a job are in one cluster."""
    is_spot: bool = False
    is_cordoned: bool = False
    """True if the node is cordoned: running workers may stay, and no worker is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A share of the cluster. Quotas count workers."""

    name: str
    parent: str | None = None
    weight: float = 1.0
    guaranteed: int = 0
    """Workers that the project gets back from borrowers for its jobs: at once from what is above their minima, after a
    grace from jobs of no higher priority."""
    limit: int | None = None
    """Most workers that the project ever has; None means no limit."""
    max_running: int | None = None
    """Jobs with a grant at the same time."""
    max_queued: int | None = None
    """Checked at submit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """How many jobs a user may have."""

    name: str
    max_running: int | None = None
    """Jobs with a grant at the same time."""
    max_queued: int | None = None
    """Checked at submit."""


class ClusterState(StrEnum):
    """Whether a cluster that has joined takes jobs."""

    OPEN = "open"
    CORDONED = "cordoned"
    """The cluster is cordoned: its workers stay, and nothing starts or grows there."""
    AWAY = "away"
    """The cluster does not answer: its nodes are not in the market, and its jobs are leaving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketState:
    """Everything that a decision depends on, except the time."""

    jobs: Sequence[MarketJob]
    nodes: Sequence[MarketNode]
    projects: Mapping[str, Project] = field(default_factory=dict)
    """Projects by name. Jobs of a project that is not listed share DEFAULT_PROJECT's rules."""
    users: Mapping[str, User] = field(default_factory=dict)
    """Users by name. If a user is not listed, DEFAULT_USER's limits apply, to each such user separately."""
    clusters: Mapping[str, ClusterState] = field(default_factory=dict)
    """The clusters that have joined, by name. A cluster that only nodes name is open."""


WorkerFlow: TypeAlias = tuple[str, int]
"""Id of the other job, and how many workers go there or come from there."""


class Start(NamedTuple):
    """The first grant of a queued job."""

    job_id: str
    workers: int
    reason: str
    cluster: str = ""
    """Name of the cluster in which the job starts."""
    flows: tuple[WorkerFlow, ...] = ()
    """The jobs that give workers to it; the others of its workers are free."""


class Resize(NamedTuple):
    """A new number of workers for a running job."""

    job_id: str
    workers: int
    reason: str
    flows: tuple[WorkerFlow, ...] = ()
    """With more workers than before, the jobs that give them; with fewer, those that get them."""


class Preempt(NamedTuple):
    """A running job gives up all of its workers: it saves and returns to the queue. No step is lost."""

    job_id: str
    reason: str
    beneficiary: str
    """The job that gets the workers."""
    flows: tuple[WorkerFlow, ...] = ()
    """The jobs that get its workers; the others of its workers become free."""


class Wait(NamedTuple):
    """A queued job does not start yet."""

    job_id: str
    reason: str
    """What is missing, who has it, and the way out."""
    position: int
    """Place in the order in which jobs would start; 1 is next."""
    holders: tuple[str, ...] = ()
    """Jobs that hold what is waited for."""
    expected_at: float | None = None
    """Wall-clock time at which the job is expected to start; None means not known."""
    waits_for_limit: bool = False
    """True if more nodes would not help: a limit of its project, its user or its sweep is in the way, or no cluster in
    which it may start takes jobs."""


Decision: TypeAlias = Start | Resize | Preempt | Wait
Policy: TypeAlias = Callable[[MarketState, float], Sequence[Decision]]
"""A scheduling policy: (state, now) -> decisions."""
