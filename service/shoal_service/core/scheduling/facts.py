"""Facts: what follows from the value of one job alone, derived once and kept with that value.

The control loop passes the same MarketJob again as long as the job has not changed. So a decision derives these
numbers only for the jobs that are new or have trained since the last one. Nothing here depends on the time, on other
jobs or on nodes, and a decision is the same whether a number was kept or is derived again.
Called by `plan`, `gains` and `reservations`, and by the control loop to see what has changed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeAlias

from shoal_service.core.scheduling.curves import Segment, hull
from shoal_service.core.scheduling.estimates import (
    latest_start,
    queue_time,
    queue_time_by_deadline,
    worker_seconds_left,
)
from shoal_service.core.scheduling.market import CapacityKind, MarketJob, Placement

PRIORITY_DOUBLES = 50.0
"""This many points of priority double a job's weight. A priority is about who starts. If it weighed more on what is
above the minimum, an urgent job that is long would take the workers of many short ones."""

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
        """Equal for queued jobs that ask for the same, and as a rule the same object."""
        self.work_s = worker_seconds_left(job)
        self._order = (queue_time(job, self.work_s), job.job_id)
        self._due: tuple[float, tuple[float, str]] | None = None
        """The latest start by which its deadline can be made, and its place in the queue until then."""
        if job.finish_by is not None and job.left is not None:
            latest = latest_start(job)
            self._due = latest, min(self._order, (queue_time_by_deadline(job, latest), job.job_id))
        self._division: tuple[tuple[Segment, ...], float] | None = None
        self._ends: tuple[float, float] | None = None
        self._standing: tuple[object, ...] | None = None

    @property
    def shape_key(self) -> ShapeKey:
        """Equal for jobs whose workers are alike and may use the same nodes of a cluster."""
        return self.claim_key[-1]

    def order(self, now: float) -> tuple[float, str]:
        """Place in the queue. A deadline counts as long as it can be made."""
        return self._due[1] if self._due is not None and now <= self._due[0] else self._order

    def division(self, job: MarketJob) -> tuple[tuple[Segment, ...], float]:
        """The hull of its curve from its minimum on, and the weight of a sample of it per second before that by length:
        its priority, relative to its rate per worker at its minimum."""
        if self._division is None:
            weight = 2.0 ** (job.priority / PRIORITY_DOUBLES) * job.min_workers / job.curve.rate(job.min_workers)
            self._division = (hull(job.curve, job.min_workers, job.max_workers), weight)
        return self._division

    def ends(self, job: MarketJob) -> tuple[float, float]:
        """Seconds to its end with its best number of workers, and with those that it has (from its minimum on, if it
        has none); infinite if the work is not known."""
        if self._ends is None:
            if job.left is None:
                self._ends = (math.inf, math.inf)
            else:
                rate = job.curve.rate(job.granted or job.min_workers)
                self._ends = (job.left / max(job.curve.rates), job.left / rate)
        return self._ends

    def standing(self, job: MarketJob) -> tuple[object, ...]:
        """All that decisions depend on but its progress."""
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
    """Kept, since thousands of jobs ask for the same: one key for all of them is less to build and to compare."""
    shape_key = cpus, gpus, memory_gib, capacity, placement, labels
    return project, user, sweep, sweep_limit, priority, min_workers, cluster, excluded_clusters, shape_key


def facts_of(job: MarketJob) -> Facts:
    """Derived at the first call for this value."""
    found: Facts | None = job.memo
    if found is None:
        found = Facts(job)
        object.__setattr__(job, "memo", found)  # frozen, and equal before and after
    return found
