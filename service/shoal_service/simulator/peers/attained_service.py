"""Least attained service (Tiresias, NSDI 2019): rigid jobs in three queues by the worker-seconds that they have had.

A job starts in the first queue and sinks as it is served. The workers go to the first queue before the second, and
within a queue to the oldest job; the others are preempted. The policy needs no knowledge of remaining work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_service.core.scheduling.market import Decision, MarketJob, MarketState, Policy
from shoal_service.simulator.peers.allocation import admit, decisions, num_workers

QUEUE_LIMITS_S = (3_600.0, 36_000.0)
"""Worker-seconds after which a job leaves the first and the second queue."""
EVERY_S = 60.0
"""A job that sinks is no event, so the policy looks once a minute, as Tiresias does."""


def attained_service(asked: Mapping[str, int]) -> Policy:
    """`asked`: the number of workers of each job."""

    def order(job: MarketJob) -> tuple[int, float, str]:
        queue = sum(job.served_s >= limit for limit in QUEUE_LIMITS_S)
        return queue, job.submitted_at, job.job_id

    def policy(state: MarketState, now: float) -> Sequence[Decision]:
        wanted = admit(sorted(state.jobs, key=order), asked, num_workers(state), may_pass=True)
        return decisions(state, wanted, "Least attained service first, with as many workers as asked for")

    return policy
