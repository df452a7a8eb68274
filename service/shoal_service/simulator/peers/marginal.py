"""Greedy policies: workers one by one to the job that gains most from one more, by two measures of gain.

`optimus` (EuroSys 2018): seconds of remaining time that one more worker saves. Long jobs gain most.
`elastic_srpt`: share of the remaining work that one more worker adds per second, so that the jobs that can be finished
soonest are finished soonest: SRPT (shortest remaining processing time) for jobs that run faster on more workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

from shoal_service.core.scheduling.market import Decision, MarketJob, MarketState, ThroughputCurve
from shoal_service.simulator.peers.allocation import by_age, decisions, num_workers

Gain = Callable[[MarketJob, int], float]
"""What one worker more than this number is worth to a job."""


def optimus(state: MarketState, now: float) -> Sequence[Decision]:
    return decisions(state, greedy(state, _seconds_saved), "Where one more worker saves most time")


def elastic_srpt(state: MarketState, now: float) -> Sequence[Decision]:
    return decisions(state, greedy(state, _relative_speed), "Where one more worker adds most to a short remaining time")


def greedy(state: MarketState, gain: Gain) -> dict[str, int]:
    """Each job's minimum, the oldest first while they fit; the rest one by one, while a job gains."""
    free = num_workers(state)
    wanted: dict[str, int] = {}
    heap: list[tuple[float, str, MarketJob]] = []
    for job in sorted(state.jobs, key=by_age):
        if job.min_workers > free:
            continue
        free -= job.min_workers
        wanted[job.job_id] = job.min_workers
        if job.max_workers > job.min_workers:
            heap.append((-gain(job, job.min_workers), job.job_id, job))
    heapq.heapify(heap)
    while free and heap:
        loss, job_id, job = heapq.heappop(heap)
        if loss >= 0:
            break
        workers = wanted[job_id] = wanted[job_id] + 1
        free -= 1
        if workers < job.max_workers:
            heapq.heappush(heap, (-gain(job, workers), job_id, job))
    return wanted


def _seconds_saved(job: MarketJob, workers: int) -> float:
    left = job.left or 0.0
    return left / job.curve.rate(workers) - left / job.curve.rate(workers + 1)


def _relative_speed(job: MarketJob, workers: int) -> float:
    rates = hull(job.curve, job.max_workers)
    return (rates[workers + 1] - rates[workers]) / max(job.left or 0.0, 1e-9)


@lru_cache(maxsize=1024)
def hull(curve: ThroughputCurve, most: int) -> tuple[float, ...]:
    """The least concave function above the curve, at 0 to `most` workers.

    Where a curve has a step ahead, the workers before it are worth their share of it; without this, a greedy policy
    stops in front of every step.
    """
    corners: list[tuple[int, float]] = []
    for point in ((size, curve.rate(size)) for size in range(most + 1)):
        while len(corners) >= 2 and _is_below(corners[-1], corners[-2], point):
            corners.pop()
        corners.append(point)
    rates = [corners[0][1]]
    for (left, low), (right, high) in pairwise(corners):
        rates += [low + (high - low) * (size - left) / (right - left) for size in range(left + 1, right + 1)]
    return tuple(rates)


def _is_below(middle: tuple[int, float], left: tuple[int, float], right: tuple[int, float]) -> bool:
    """The middle point is on or below the line from the left to the right one."""
    return (middle[1] - left[1]) * (right[0] - left[0]) <= (right[1] - left[1]) * (middle[0] - left[0])
