"""What is asked of the autoscaler of each cluster: room for what jobs have, and for the minima of jobs that wait.

Nodes beyond that may be released. Pure; the control loop sends the answer, if `scale_out` is on. A job that waits for a
limit, or for a cluster that takes no jobs, is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shoal_service.clusters.snapshot import RoomKind
from shoal_service.core.scheduling.admission import limit_in_the_way
from shoal_service.core.scheduling.facts import facts_of
from shoal_service.core.scheduling.market import (
    ClusterState,
    Decision,
    MarketJob,
    MarketState,
    Resize,
    Start,
    Wait,
)
from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.room import Room
from shoal_workers.contract.placing import label_selector

MAX_WORKERS = 2_000
"""More are not asked of a cluster at a time: Ray gets one entry per worker."""


def demand(state: MarketState, decisions: Sequence[Decision]) -> dict[str, dict[RoomKind, int]]:
    """How many workers of each kind each cluster should have room for, after these decisions; one entry for each known
    cluster, by name. If none is known, the one entry is of the empty name.

    A waiting job counts only if it could start beside the others that are asked for: nodes do not help against a limit
    of its project, of a project above it, of its user or of its sweep. One that may start in any of several clusters
    counts in one of them, so that not every autoscaler adds nodes for it: where the nodes that it may use have room for
    most such workers while they are empty, which is as a rule where the least is missing. That changes with nodes only,
    not with the jobs on them, so a request does not wander from one autoscaler to another. Clusters of equal room are
    taken by name. To have another one grow, the job names it (`worker.cluster`).
    """
    granted = {job.job_id: job.granted for job in state.jobs}
    granted |= {one.job_id: one.workers for one in decisions if isinstance(one, Start | Resize)}
    clusters = _Clusters(state, decisions)
    plan = Plan(replace(state, nodes=()), now=0.0)  # limits depend neither on the nodes nor on the time
    entries = {entry.job.job_id: entry for entry in (*plan.leaving, *plan.running, *plan.queued)}
    waiting = [entries[one.job_id] for one in sorted(_waits(decisions), key=lambda wait: wait.position)]
    found = {name: Counter[RoomKind]() for name in clusters.names}
    running = [entry for job_id, entry in entries.items() if granted[job_id]]
    for entry in running:
        of_cluster = found.setdefault(clusters.of(entry.job), Counter())
        _ask(plan, of_cluster, entry, min(granted[entry.job.job_id], entry.job.min_workers))
    for entry in waiting:
        name = clusters.for_waiting(entry.job)
        if name is not None and limit_in_the_way(plan, entry, entry.job.min_workers) is None:
            _ask(plan, found.setdefault(name, Counter()), entry, entry.job.min_workers)
    for entry in running:  # workers above a minimum are given to a job that waits, where a limit has no room for both
        above = granted[entry.job.job_id] - entry.charged
        _ask(plan, found[clusters.of(entry.job)], entry, int(min(above, max(0, entry.share.room()))))
    return {name: dict(of_cluster) for name, of_cluster in found.items()}


class _Clusters:
    """Chooses the cluster in which a job counts."""

    def __init__(self, state: MarketState, decisions: Sequence[Decision]) -> None:
        self._room = Room(state.nodes, now=0.0)  # also nodes that are about to end: others will come in their place
        closed = {name for name, one in state.clusters.items() if one is not ClusterState.OPEN}
        self.names = sorted({*self._room.clusters, *state.clusters}) or [""]
        self._open = [name for name in self.names if name not in closed]
        self._starts = {one.job_id: one.cluster for one in decisions if isinstance(one, Start)}

    def of(self, job: MarketJob) -> str:
        """Cluster of a job that has workers, or starts."""
        return self._starts.get(job.job_id, "") or job.cluster or self.names[0]

    def for_waiting(self, job: MarketJob) -> str | None:
        """None: none that it may start in takes jobs."""
        names = [name for name in self._open if name not in job.excluded_clusters and job.cluster in ("", name)]
        if len(names) < 2:
            return names[0] if names else None
        room = {shape.cluster: shape.ever for shape in self._room.choices(job, facts_of(job))}
        return max(names, key=lambda name: room.get(name, 0))  # of equal ones the first


def _ask(plan: Plan, found: Counter[RoomKind], entry: Entry, workers: int) -> None:
    if found.total() + workers <= MAX_WORKERS and workers:
        labels = label_selector(entry.job.selector, entry.job.capacity)
        found[RoomKind(entry.job.need, tuple(sorted(labels.items())))] += workers
        plan.charge(entry, entry.charged + workers)


def _waits(decisions: Sequence[Decision]) -> list[Wait]:
    return [one for one in decisions if isinstance(one, Wait) and not one.waits_for_limit]
