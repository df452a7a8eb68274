"""Policies for rigid jobs: each runs with exactly the workers that its user asked for, or waits.

`fifo` starts jobs in the order of their submission and lets no job pass (the default of most batch systems; "FIFO").
`srtf` gives the workers to the jobs with the shortest remaining time, and preempts the others ("SRTF").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_service.core.scheduling.market import Decision, MarketJob, MarketState, Policy
from shoal_service.simulator.peers.allocation import admit, by_age, decisions, num_workers


def fifo(asked: Mapping[str, int]) -> Policy:
    """`asked`: the number of workers of each job. Nothing is preempted as long as no node leaves."""

    def policy(state: MarketState, now: float) -> Sequence[Decision]:
        running = sorted((job for job in state.jobs if job.granted), key=by_age)
        queued = sorted((job for job in state.jobs if not job.granted), key=by_age)
        wanted = admit([*running, *queued], asked, num_workers(state), may_pass=False)
        return decisions(state, wanted, "In the order of submission, with as many workers as asked for")

    return policy


def srtf(asked: Mapping[str, int]) -> Policy:
    """`asked`: the number of workers of each job."""

    def remaining_s(job: MarketJob) -> tuple[float, str]:
        return (job.left or 0.0) / job.curve.rate(asked[job.job_id]), job.job_id

    def policy(state: MarketState, now: float) -> Sequence[Decision]:
        wanted = admit(sorted(state.jobs, key=remaining_s), asked, num_workers(state), may_pass=True)
        return decisions(state, wanted, "Shortest remaining time first, with as many workers as asked for")

    return policy
