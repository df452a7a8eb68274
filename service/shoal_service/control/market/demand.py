"""What is asked of Ray's autoscaler: room for what jobs have, and for the minima of those that wait for capacity.

Nodes beyond that may be released. Pure; the control loop sends the answer, if `scale_out` is on. A job that waits for a
limit is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shoal_service.clusters.snapshot import RoomKind
from shoal_service.core.scheduling.admission import limit_in_the_way
from shoal_service.core.scheduling.market import (
    Decision,
    MarketState,
    Resize,
    Start,
    Wait,
)
from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_workers.contract.placing import label_selector

MAX_WORKERS = 2_000
"""More are not asked for at a time: Ray gets one entry per worker."""


def demand(state: MarketState, decisions: Sequence[Decision]) -> dict[RoomKind, int]:
    """How many workers of each kind the cluster should have room for, after these decisions.

    A waiting job counts only if it could start beside the others that are asked for: nodes do not help against a limit
    of its project, of a project above it, of its user or of its sweep.
    """
    granted = {job.job_id: job.granted for job in state.jobs}
    granted |= {one.job_id: one.workers for one in decisions if isinstance(one, Start | Resize)}
    plan = Plan(replace(state, nodes=()), now=0.0)  # limits depend neither on the nodes nor on the time
    entries = {entry.job.job_id: entry for entry in (*plan.leaving, *plan.running, *plan.queued)}
    waiting = [entries[one.job_id] for one in sorted(_waits(decisions), key=lambda wait: wait.position)]
    found = Counter[RoomKind]()
    running = [entry for job_id, entry in entries.items() if granted[job_id]]
    for entry in running:
        _ask(plan, found, entry, min(granted[entry.job.job_id], entry.job.min_workers))
    for entry in waiting:
        if limit_in_the_way(plan, entry, entry.job.min_workers) is None:
            _ask(plan, found, entry, entry.job.min_workers)
    for entry in running:  # workers above a minimum are given to a job that waits, where a limit has no room for both
        above = granted[entry.job.job_id] - entry.charged
        _ask(plan, found, entry, int(min(above, max(0, entry.share.room()))))
    return dict(found)


def _ask(plan: Plan, found: Counter[RoomKind], entry: Entry, workers: int) -> None:
    if found.total() + workers <= MAX_WORKERS and workers:
        labels = label_selector(entry.job.selector, entry.job.capacity)
        found[RoomKind(entry.job.need, tuple(sorted(labels.items())))] += workers
        plan.charge(entry, entry.charged + workers)


def _waits(decisions: Sequence[Decision]) -> list[Wait]:
    return [one for one in decisions if isinstance(one, Wait) and not one.waits_for_limit]
