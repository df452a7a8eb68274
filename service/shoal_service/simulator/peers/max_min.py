"""Max-min fairness: workers one by one to the job that has the fewest, whatever they are worth there.

The oldest jobs get their minimum first while there is room, so no job waits while others have more than they need.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from shoal_service.core.scheduling.market import Decision, MarketState
from shoal_service.simulator.peers.allocation import by_age, decisions, num_workers


def max_min(state: MarketState, now: float) -> Sequence[Decision]:
    free = num_workers(state)
    wanted: dict[str, int] = {}
    heap: list[tuple[int, float, str, int]] = []
    for job in sorted(state.jobs, key=by_age):
        if job.min_workers > free:
            continue
        free -= job.min_workers
        wanted[job.job_id] = job.min_workers
        if job.max_workers > job.min_workers:
            heap.append((job.min_workers, job.submitted_at, job.job_id, job.max_workers))
    heapq.heapify(heap)
    while free and heap:
        workers, at, job_id, most = heapq.heappop(heap)
        wanted[job_id] = workers + 1
        free -= 1
        if workers + 1 < most:
            heapq.heappush(heap, (workers + 1, at, job_id, most))
    return decisions(state, wanted, "Equal numbers of workers")
