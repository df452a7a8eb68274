"""Deadlines: how many workers a job needs to make `finish_by`, and whether it can be made at all.

`workers_for_deadline` is called by `gains`; `verdict` by the submission, which answers if a deadline
cannot be met. Such a deadline has no weight, here or in the queue: others would give up workers for nothing.
"""

from __future__ import annotations

from shoal_service.core.quantities import count_text
from shoal_service.core.scheduling.estimates import known_sizes, seconds_left
from shoal_service.core.scheduling.market import MarketJob


def workers_for_deadline(job: MarketJob, now: float) -> int:
    """The smallest size with which the job ends in time; 0 without a deadline, or if no size does."""
    if job.finish_by is None or job.left is None:
        return 0
    most = job.finish_by - now - (job.start_s if job.granted == 0 else job.switch_s)
    for size in range(job.min_workers, job.max_workers + 1) if job.max_workers <= 64 else known_sizes(job):
        if seconds_left(job, size) <= most:
            return size
    return 0


def verdict(job: MarketJob, now: float) -> str | None:
    """Why the deadline cannot be met even if the job gets all of its workers at once; None: it can, or is not known."""
    if job.finish_by is None or job.left is None or workers_for_deadline(job, now):
        return None
    best = max(known_sizes(job), key=lambda size: (job.curve.rate(size), -size))
    needs = job.start_s + seconds_left(job, best)
    return (
        f"finish_by is in {duration(job.finish_by - now)}, but with {count_text(best, 'worker')} it "
        f"takes {duration(needs)}. "
        f"Set a later finish_by, or a larger elasticity.max_workers ({job.max_workers} now)."
    )


def duration(seconds: float) -> str:
    """The duration as people read it: "50 s", "12 min", "3 h 20 min"."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
