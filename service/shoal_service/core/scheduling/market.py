"""The market as data: what a scheduling policy reads and returns. Jobs, nodes, projects; start, resize, preempt, wait.

    control loop (store + cluster)  \
                                      ->  MarketState  ->  policy(state, now)  ->  decisions  ->  carried out
    simulator (trace + capacity)    /

A policy is a pure function. It returns one decision for every queued job and for every running job that changes.
Decisions are named tuples: thousands are made in a pass, and a frozen dataclass takes several times as long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

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
    memo: Any = field(default=None, init=False, repr=False, compare=False)
    """What `facts` has derived from this value, so that a job that has not changed costs the next decision less."""


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
