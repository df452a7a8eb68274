"""What a changed spec will do to its job: workers and layout before and after, in words. Pure; used by `scale` and
`relayout`. The layout is the planner's answer, which the caller requests for `next_workers`."""

from __future__ import annotations

from shoal_service.core.quantities import count_text
from shoal_service.views import JobView


def next_workers(job: JobView) -> int:
    """The number of workers of the group that forms next; of a job that does not train, the most that it may get."""
    elastic, granted = job.spec.elasticity, job.status.desired_workers
    if not job.status.workers:
        return elastic.max_workers
    return max(elastic.min_workers, min(granted or job.status.workers, elastic.max_workers))


def change_page(job: JobView, layout: str, reason: str) -> str:
    """
    Args:
        layout: the planner's for `next_workers(job)`; empty: it has none.
        reason: why that layout, or why none.
    """
    lines = [
        f"{job.id}  {job.name}  {job.status.state}",
        f"workers  {_workers(job)}",
        f"layout   {_layout(job, layout)}",
    ]
    return "\n".join([*lines, f"         {reason}"] if reason else lines)


def _workers(job: JobView) -> str:
    elastic, now, following = job.spec.elasticity, job.status.workers, next_workers(job)
    limits = f"(min {elastic.min_workers}, max {elastic.max_workers}, standby {elastic.standby})"
    if not now:
        some = count_text(elastic.max_workers, "worker")
        words = some if elastic.min_workers == elastic.max_workers else f"{elastic.min_workers} to {some}"
        return f"{words} when it starts {limits}"
    if following < now:
        words = f"{now} -> {following} at the next step boundary; no step is lost"
    elif following > now:
        words = f"{now} -> {following} as soon as the other workers are ready; no step is lost"
    elif following < elastic.max_workers:
        words = f"{now}, and up to {elastic.max_workers} when that pays; `shoal show {job.id}` says what holds it back"
    else:
        words = f"{now}, as before"
    return f"{words} {limits}"


def _layout(job: JobView, layout: str) -> str:
    before = job.status.layout if job.status.workers else ""
    if not layout:
        return f"{before or 'none'}; the planner has no other"
    if not before:
        return f"{layout} for {count_text(next_workers(job), 'worker')}"
    return f"{before}, as before" if before == layout else f"{before} -> {layout} at the next step boundary"
