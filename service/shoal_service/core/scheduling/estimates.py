"""What is expected of a job: work that is left, time to its end, and its place in the queue.

Called by the parts of `decide`. Every estimate uses the job's measured curve; none of them reads anything but the job.
"""

from __future__ import annotations

import math

from shoal_service.core.scheduling.market import MarketJob

PRIOR_WORKER_S = 600.0
"""Worker-seconds that are expected to remain of a job of unknown length, at least. Job lengths are heavy-tailed, so a
job that has received more than this is expected to need as much again (Tiresias, NSDI 2019)."""

SECONDS_PER_PRIORITY = 360.0
"""A point of priority counts as much in the queue as this time of waiting, so no priority is overtaken for ever."""

LENGTH_SHARE = 2.0
"""A job may be overtaken by shorter ones that are submitted within this many times its own length after it."""

MAX_OVERTAKEN_S = 4 * 3600.0
"""A job is not overtaken by jobs that are submitted later than this after it. Both limits were chosen with
`bench/schedule`; docs/scheduling.md has the comparison."""

AGED_AFTER_S = 24 * 3600.0
"""A queued job that was without workers for this much longer than with them goes first, whatever its priority."""

AGED_UNTIL_S = 12 * 3600.0
"""A job that went first keeps its minimum until it was without workers for only this much longer than with them."""

DEADLINE_MARGIN_S = 600.0
"""A job with a deadline is to start this long before the last moment at which it could make the deadline."""


def worker_seconds_left(job: MarketJob) -> float:
    """Work that remains, in seconds of one worker: how jobs with different samples are compared by length.

    The rate of a worker is that at the job's smallest size, where it is most efficient as a rule.
    """
    if job.left is None:
        return max(PRIOR_WORKER_S, job.served_s)
    least = job.min_workers
    return job.left / (job.curve.rate(least) / least)


def seconds_left(job: MarketJob, workers: int) -> float:
    """Time to the end with this many workers; infinite if the work is not known, or without workers."""
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
    """By how much longer it was without workers than with them; a worker beyond the minimum counts as more time."""
    return now - job.submitted_at - 2 * job.served_s / job.min_workers


def latest_start(job: MarketJob) -> float:
    """The last moment at which the job could get its best number of workers and still make its deadline; infinite
    without a deadline, or if the work is not known."""
    if job.finish_by is None or job.left is None:
        return math.inf
    pause_s = job.switch_s if job.granted else job.start_s
    return job.finish_by - pause_s - min(seconds_left(job, size) for size in known_sizes(job))


def known_sizes(job: MarketJob) -> list[int]:
    """Its smallest and largest size and those between them that its curve has. One of them is the fastest."""
    between = [size for size in job.curve.sizes if job.min_workers < size < job.max_workers]
    return [job.min_workers, *between, job.max_workers]


def queue_time_by_deadline(job: MarketJob, latest: float) -> float:
    """Virtual time of submit of a job that has to start by `latest`. As the other one, no priority is overtaken for
    ever: a deadline that can still be made is not long before the submission."""
    return latest - DEADLINE_MARGIN_S - SECONDS_PER_PRIORITY * job.priority
