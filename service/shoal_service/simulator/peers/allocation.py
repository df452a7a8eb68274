"""From the number of workers that each job should have to the decisions that a policy returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from shoal_service.core.scheduling.market import Decision, MarketJob, MarketState, Preempt, Resize, Start, Wait


def num_workers(state: MarketState) -> int:
    """The workers that fit: peers know nodes of one kind, and workers that need one CPU."""
    return sum(math.floor(node.cpus) for node in state.nodes)


def decisions(state: MarketState, wanted: Mapping[str, int], reason: str) -> list[Decision]:
    """What makes every job have the workers that `wanted` has for it; 0 for a job that it does not have."""
    found: list[Decision] = []
    position = 0
    for job in state.jobs:
        workers = wanted.get(job.job_id, 0)
        if workers == job.granted:
            if not workers:
                position += 1
                found.append(Wait(job.job_id, f"{reason}: no worker for it now.", position))
        elif not job.granted:
            found.append(Start(job.job_id, workers, reason))
        elif not workers:
            found.append(Preempt(job.job_id, reason, beneficiary=""))
        else:
            found.append(Resize(job.job_id, workers, reason))
    return found


def by_age(job: MarketJob) -> tuple[float, str]:
    return job.submitted_at, job.job_id


def admit(jobs: Iterable[MarketJob], asked: Mapping[str, int], free: int, *, may_pass: bool) -> dict[str, int]:
    """Rigid jobs that fit, in this order; after one that does not fit, others only if they may pass it."""
    wanted: dict[str, int] = {}
    for job in jobs:
        workers = asked[job.job_id]
        if workers <= free:
            wanted[job.job_id] = workers
            free -= workers
        elif not may_pass:
            break
    return wanted
