"""What follows from one job alone: its length, its place in the queue, the workers that its deadline needs.

The control loop passes the same MarketJob again as long as the job has not changed. `derive_facts` derives the facts
once and keeps them with that value, so a decision derives them only for jobs that are new or have trained since the
last one. Nothing here depends on other jobs or on nodes, and a decision is the same whether a number was kept or
derived again. Every estimate uses the job's measured curve.
The control loop sees from `Facts.standing` what has changed; the submission answers with `verdict` if a deadline cannot
be met.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeAlias

from shoal_service.core.quantities import count_text, duration_text
from shoal_service.core.scheduling.market import MarketJob, Segment, hull
from shoal_workers.contract import CapacityKind, Placement

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


class Facts:
    """What decisions need to know of one job."""

    __slots__ = ("_division", "_due", "_ends", "_order", "_standing", "claim_key", "work_s")

    def __init__(self, job: MarketJob) -> None:
        need = job.need
        self.claim_key: ClaimKey = _claim_key(
            *(job.project, job.user, job.sweep, job.sweep_limit, job.priority, job.min_workers, job.cluster),
            _NO_CLUSTERS if job.granted else job.excluded_clusters,
            *(need.cpus, need.gpus, need.memory_gib, job.capacity, job.placement),
            frozenset(job.selector.items()) if job.selector else _NO_LABELS,
        )
        """Key of the job's claim: equal for queued jobs that ask for the same, and then as a rule the same object."""
        self.work_s = worker_seconds_left(job)
        self._order = (queue_time(job, self.work_s), job.job_id)
        self._due: tuple[float, tuple[float, str]] | None = None
        """The latest start by which the job can meet its deadline, and its place in the queue until then; None if it
        has no deadline, or its work is not known."""
        if job.finish_by is not None and job.left is not None:
            latest = latest_start(job)
            self._due = latest, min(self._order, (queue_time_by_deadline(job, latest), job.job_id))
        self._division: tuple[tuple[Segment, ...], float] | None = None
        self._ends: tuple[float, float] | None = None
        self._standing: tuple[object, ...] | None = None

    @property
    def shape_key(self) -> ShapeKey:
        """Key of the job's shape: equal for jobs whose workers are alike and may use the same nodes of a cluster."""
        return self.claim_key[-1]

    def order(self, now: float) -> tuple[float, str]:
        """Place in the queue; less is earlier. A deadline counts as long as it can be met."""
        return self._due[1] if self._due is not None and now <= self._due[0] else self._order

    def division(self, job: MarketJob) -> tuple[tuple[Segment, ...], float]:
        """The hull of the job's curve from its minimum on, and the weight of one sample per second before the weight by
        length: the priority's weight, relative to the job's rate per worker at its minimum."""
        if self._division is None:
            weight = 2.0 ** (job.priority / PRIORITY_DOUBLES) * job.min_workers / job.curve.rate(job.min_workers)
            self._division = (hull(job.curve, job.min_workers, job.max_workers), weight)
        return self._division

    def ends(self, job: MarketJob) -> tuple[float, float]:
        """Seconds to the job's end with its best number of workers, and with those that it has (its minimum, if it has
        none); infinite if the work is not known."""
        if self._ends is None:
            if job.left is None:
                self._ends = (math.inf, math.inf)
            else:
                rate = job.curve.rate(job.granted or job.min_workers)
                self._ends = (job.left / max(job.curve.rates), job.left / rate)
        return self._ends

    def standing(self, job: MarketJob) -> tuple[object, ...]:
        """Everything about the job that decisions depend on, except its progress."""
        if self._standing is None:
            self._standing = (
                *(job.job_id, job.granted, job.held, job.max_workers, job.finish_by, job.is_leaving),
                self.claim_key,
            )
        return self._standing


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


def derive_facts(job: MarketJob) -> Facts:
    """Return the facts of a job: derived at the first call for this value, and kept with it."""
    facts: Facts | None = job.memo
    if facts is None:
        facts = Facts(job)
        object.__setattr__(job, "memo", facts)  # frozen, and equal before and after
    return facts


def worker_seconds_left(job: MarketJob) -> float:
    """Work that remains, in seconds of one worker: how jobs with different samples are compared by length.

    The rate of a worker is that at the job's smallest size, where it is most efficient as a rule.
    """
    if job.left is None:
        return max(PRIOR_WORKER_S, job.served_s)
    least = job.min_workers
    return job.left / (job.curve.rate(least) / least)


def seconds_left(job: MarketJob, workers: int) -> float:
    """Seconds to the end with this many workers; infinite if the work is not known, or without workers."""
    rate = job.curve.rate(workers)
    return math.inf if job.left is None or rate <= 0 else job.left / rate


def queue_time(job: MarketJob, work_s: float) -> float:
    """Virtual time of submit, without a deadline: the queue is in this order. It never changes while a job waits.

    `work_s` is the work that remains, in seconds of one worker. Shorter jobs and higher priorities are earlier. Since
    each bonus is bounded, only jobs that are submitted within a bounded time after a job can overtake it.
    """
    at = job.submitted_at + min(MAX_OVERTAKEN_S, LENGTH_SHARE * work_s / job.min_workers)
    return at - SECONDS_PER_PRIORITY * job.priority


def starved_s(job: MarketJob, now: float) -> float:
    """Seconds by which the job was longer without workers than with them. A worker beyond the minimum counts as more
    time with workers."""
    return now - job.submitted_at - 2 * job.served_s / job.min_workers


def latest_start(job: MarketJob) -> float:
    """The last moment at which the job could get its best number of workers and still make its deadline; infinite
    without a deadline, or if the work is not known."""
    if job.finish_by is None or job.left is None:
        return math.inf
    pause_s = job.switch_s if job.granted else job.start_s
    return job.finish_by - pause_s - min(seconds_left(job, size) for size in known_sizes(job))


def known_sizes(job: MarketJob) -> list[int]:
    """The job's smallest and largest size, and the sizes between them that its curve has. One of them is the
    fastest."""
    between = [size for size in job.curve.sizes if job.min_workers < size < job.max_workers]
    return [job.min_workers, *between, job.max_workers]


def queue_time_by_deadline(job: MarketJob, latest: float) -> float:
    """Virtual time of submit of a job that has to start by `latest`. As with `queue_time`, no priority is overtaken for
    ever: a deadline that can still be met is not long before the submission."""
    return latest - DEADLINE_MARGIN_S - SECONDS_PER_PRIORITY * job.priority


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


def verdict(job: MarketJob, now: float) -> str | None:
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
