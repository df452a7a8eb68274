"""What is asked of Ray's autoscaler: room for what jobs have, and for the minima of those that wait for capacity.

Nodes beyond that may be released. Pure; the control loop sends the answer, if `scale_out` is on. A job that waits for a
limit of its project or of its user is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shoal_service.core.scheduling.market import (
    DEFAULT_PROJECT,
    Decision,
    MarketJob,
    MarketState,
    Resize,
    Start,
    Wait,
    WorkerNeed,
)
from shoal_workers.contract.placing import label_selector

MAX_WORKERS = 2_000
"""More are not asked for at a time: Ray gets one entry per worker."""


class RoomKind(NamedTuple):
    """Workers that are alike."""

    need: WorkerNeed
    labels: tuple[tuple[str, str], ...] = ()
    """Of the node, as Ray's `label_selector`; sorted."""


def demand(state: MarketState, decisions: Sequence[Decision]) -> dict[RoomKind, int]:
    """How many workers of each kind the cluster should have room for, after these decisions."""
    granted = {job.job_id: job.granted for job in state.jobs}
    granted |= {one.job_id: one.workers for one in decisions if isinstance(one, Start | Resize)}
    waiting = [one.job_id for one in sorted(_waits(decisions), key=lambda wait: wait.position)]
    jobs = {job.job_id: job for job in state.jobs}
    used = Counter[str]()
    found = Counter[RoomKind]()
    running = [(job_id, workers) for job_id, workers in granted.items() if workers]
    for job_id, workers in [*running, *((job_id, jobs[job_id].min_workers) for job_id in waiting)]:
        job = jobs[job_id]
        project = state.projects.get(job.project) or state.projects.get(DEFAULT_PROJECT)
        is_above_limit = (
            project is not None and project.limit is not None and used[job.project] + workers > project.limit
        )
        if is_above_limit or found.total() + workers > MAX_WORKERS:
            continue
        used[job.project] += workers
        found[_kind(job)] += workers
    return dict(found)


def _kind(job: MarketJob) -> RoomKind:
    return RoomKind(job.need, tuple(sorted(label_selector(job.selector, job.capacity).items())))


def _waits(decisions: Sequence[Decision]) -> list[Wait]:
    return [one for one in decisions if isinstance(one, Wait) and not one.waits_for_limit]
