"""Predicts what follows from a market and the policy's decisions.

    find_demand          the workers for which each cluster's autoscaler should have room: those that jobs have, and
                         the minimums of jobs that wait
    forecast_start       the policy's decision about a job that is not submitted
    forecast_move        its decision about a job that leaves its cluster for the one that it names, and the nodes there
    find_cramped_jobs    running jobs whose workers could not be replaced now
    predict_freed_nodes  the nodes on which the workers of a started job will become free

Pure; nothing is stored or carried out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shoal_service.clusters.wire import Reservation, RoomKind
from shoal_service.control.market.build import MarketBuilder, requested
from shoal_service.core.desired import Desired
from shoal_service.core.scheduling.admission import find_blocking_limit
from shoal_service.core.scheduling.market import (
    ClusterState,
    Decision,
    MarketJob,
    MarketNode,
    MarketState,
    Policy,
    Preempt,
    Resize,
    Start,
    Wait,
    WorkerNeed,
)
from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.room import Room, count
from shoal_service.fleet_views import StartForecast
from shoal_service.planner import HardwareProfile
from shoal_service.store.driving import DriveRow
from shoal_service.views import JobStatus
from shoal_workers.contract import JobSpec, JobState, index_of_worker, label_selector

MAX_WORKERS = 2_000
"""Largest number of workers in a request to one cluster: Ray gets one entry per worker."""
THIS_JOB = "this job"
"""The id of the job in the reason of the decision."""


def find_demand(state: MarketState, decisions: Sequence[Decision]) -> dict[str, dict[RoomKind, int]]:
    """Return the workers that each cluster should have room for, by kind.

    Counts workers after these decisions. Each known cluster has an entry; if none is known, the one entry has the empty
    name. Nodes beyond that may be released. The control loop sends the result, if `scale_out` is on.

    A waiting job counts only if no limit of its project, of a project above it, of its user or of its sweep forbids it
    to start with the others that count: nodes do not help against a limit.

    A waiting job that may start in any of several clusters counts in one of them, so that not every autoscaler adds
    nodes for it: the cluster whose empty nodes have room for most such workers, which as a rule lacks the fewest; the
    first by name, if several have equal room. That changes only with the nodes, not with the jobs on them, so a
    request does not wander from one autoscaler to another. A job that names a cluster (`worker.cluster`) counts there.
    """
    granted = {job.job_id: job.granted for job in state.jobs}
    granted |= {decision.job_id: decision.workers for decision in decisions if isinstance(decision, Start | Resize)}
    clusters = _Clusters(state, decisions)
    plan = Plan(replace(state, nodes=()), now=0.0)  # limits depend neither on the nodes nor on the time
    entries = {entry.job.job_id: entry for entry in (*plan.leaving, *plan.running, *plan.queued)}
    waits = [decision for decision in decisions if isinstance(decision, Wait) and not decision.waits_for_limit]
    waiting = [entries[wait.job_id] for wait in sorted(waits, key=lambda wait: wait.position)]
    demanded = {name: Counter[RoomKind]() for name in clusters.names}
    running = [entry for job_id, entry in entries.items() if granted[job_id]]
    for entry in running:
        in_cluster = demanded.setdefault(clusters.find_current(entry.job), Counter())
        _add_demand(plan, in_cluster, entry, min(granted[entry.job.job_id], entry.job.min_workers))
    for entry in waiting:
        name = clusters.choose(entry.job)
        if name is not None and find_blocking_limit(plan, entry, entry.job.min_workers) is None:
            _add_demand(plan, demanded.setdefault(name, Counter()), entry, entry.job.min_workers)
    for entry in running:  # last: if a limit has no room for both, waiting jobs get workers above a minimum
        above = granted[entry.job.job_id] - entry.charged
        workers = int(min(above, max(0, entry.share.room())))
        _add_demand(plan, demanded[clusters.find_current(entry.job)], entry, workers)
    return {name: dict(in_cluster) for name, in_cluster in demanded.items()}


class _Clusters:
    """Finds the cluster in which a job counts."""

    def __init__(self, state: MarketState, decisions: Sequence[Decision]) -> None:
        self._room = Room(state.nodes)
        closed = {name for name, cluster in state.clusters.items() if cluster is not ClusterState.OPEN}
        self.names = sorted({*self._room.clusters, *state.clusters}) or [""]
        self._open = [name for name in self.names if name not in closed]
        self._starts = {decision.job_id: decision.cluster for decision in decisions if isinstance(decision, Start)}

    def find_current(self, job: MarketJob) -> str:
        """Return the cluster of a job that has workers, or starts."""
        return self._starts.get(job.job_id, "") or job.cluster or self.names[0]

    def choose(self, job: MarketJob) -> str | None:
        """Choose the cluster of a job that waits; None if no cluster in which it may start takes jobs."""
        names = [name for name in self._open if name not in job.excluded_clusters and job.cluster in ("", name)]
        if len(names) < 2:
            return names[0] if names else None
        room = {shape.cluster: shape.ever for shape in self._room.choices(job)}
        return max(names, key=lambda name: room.get(name, 0))  # the first if several have equal room


def _add_demand(plan: Plan, demanded: Counter[RoomKind], entry: Entry, workers: int) -> None:
    if demanded.total() + workers <= MAX_WORKERS and workers:
        labels = label_selector(entry.job.selector, entry.job.capacity)
        demanded[RoomKind(entry.job.need, tuple(sorted(labels.items())))] += workers
        plan.charge(entry, entry.charged + workers)


def forecast_start(
    market: MarketState, spec: JobSpec, profiles: tuple[HardwareProfile, ...], policy: Policy, now: float
) -> StartForecast:
    """Predict when a job that is not submitted would start.

    For `submit --dry-run`. Adds the job to the present market, and asks the policy that decides about real jobs. Blocks
    for a decision, and for the prediction of the job's throughput.
    """
    row = DriveRow(
        id=THIS_JOB,
        spec=spec,
        spec_version=1,
        state=JobState.QUEUED,
        desired=Desired.RUN,
        attempt=0,
        granted_workers=0,
        pulled_seq=0,
        created_at=now,
        priority=spec.priority,
        status=JobStatus(),
    )
    [job] = MarketBuilder(profiles).build([row], (), {}, {}, {}, {}, now).jobs
    return _find_start(job, replace(market, jobs=[*market.jobs, job]), policy, now)


def forecast_move(
    market: MarketState, job_id: str, to: str, policy: Policy, now: float
) -> tuple[StartForecast, dict[str, WorkerNeed]]:
    """Predict if a job would start now in another cluster.

    Its present attempt counts as ended. Return also what the job would take of each node there, by node id. Blocks for
    a decision.
    """
    [job] = [job for job in market.jobs if job.job_id == job_id]
    others = [other for other in market.jobs if other is not job]
    job = replace(job, granted=0, held=0, on_nodes={}, cluster=to, is_leaving=False)
    start = _find_start(job, replace(market, jobs=[*others, job]), policy, now)
    room = Room(market.nodes)
    there = room.shape(job)
    for other, shape in [(other, room.shape(other)) for other in others if other.granted]:
        shape.stay(max(other.granted, other.held), other.on_nodes)
    taken = there.take(start.workers or 0)
    return start, {free.node.node_id: WorkerNeed().plus(job.need, workers) for free, workers in taken}


def _find_start(job: MarketJob, market: MarketState, policy: Policy, now: float) -> StartForecast:
    for decision in policy(market, now):
        if isinstance(decision, Start) and decision.job_id == job.job_id:
            return StartForecast(workers=decision.workers, reason=decision.reason, expected_at=now)
        if isinstance(decision, Wait) and decision.job_id == job.job_id:
            return StartForecast(
                position=decision.position,
                reason=decision.reason,
                holders=decision.holders,
                expected_at=decision.expected_at,
            )
    raise AssertionError("the policy decides about each queued job")


def find_cramped_jobs(
    rows: Sequence[DriveRow], nodes: Sequence[MarketNode], workers: Mapping[str, Mapping[str, int]]
) -> frozenset[str]:
    """Return the jobs whose granted workers do not all fit.

    They do not fit on the nodes of their cluster that they may use. A worker of such a job that has to leave its node
    cannot be replaced now. Workers stay where they are; then the missing ones are placed, first of jobs of higher
    priority, then of older jobs.

    Args:
        nodes: nodes that no worker has to leave.
        workers: number of workers that exist, by job and node.
    """
    room = Room(nodes)
    jobs = [
        replace(requested(row), cluster=row.cluster)
        for row in sorted(rows, key=lambda row: (-row.priority, row.created_at, row.id))
    ]
    shapes = [room.shape(job) for job in jobs]
    node_ids = {node.node_id for node in nodes}
    missing = []
    for job, shape in zip(jobs, shapes, strict=True):
        there = {node_id: num for node_id, num in workers.get(job.job_id, {}).items() if node_id in node_ids}
        staying = min(job.granted, sum(there.values()))
        missing.append(job.granted - (count(shape.stay(staying, there)) if staying else 0))
    return frozenset(
        job.job_id
        for job, shape, num_missing in zip(jobs, shapes, missing, strict=True)
        if count(shape.take(num_missing)) < num_missing
    )


def predict_freed_nodes(
    changes: Sequence[Start | Resize | Preempt],
    grants: Mapping[str, int],
    reservations: Sequence[Reservation],
    find_cluster: Callable[[Start | Resize | Preempt], str],
) -> dict[str, Counter[str]]:
    """Return the workers that others in the same cluster give up for starting jobs, by node.

    A job that takes free room instead has fewer workers here than it starts with, or no entry. This is a guess, from
    which processes are started ahead of time: a job that shrinks gives up the workers of its last ranks, which are as a
    rule the newest.

    Args:
        grants: workers of each job before the changes.
        find_cluster: returns the cluster of a change.
    """
    nodes: dict[str, list[str]] = defaultdict(list)
    for change in changes:
        nodes[find_cluster(change)] += _find_given_up(change, grants, reservations)
    freed: dict[str, Counter[str]] = {}
    for change in changes:
        if isinstance(change, Start) and (there := nodes[find_cluster(change)]):
            freed[change.job_id] = Counter(there[: change.workers])
            del there[: change.workers]
    return freed


def _find_given_up(
    change: Start | Resize | Preempt, grants: Mapping[str, int], reservations: Sequence[Reservation]
) -> list[str]:
    """Return the node of each worker that the job gives up."""
    if isinstance(change, Start):
        return []
    num_kept = change.workers if isinstance(change, Resize) else 0
    if num_kept >= grants.get(change.job_id, 0):
        return []
    workers = [worker for worker in reservations if worker.job_id == change.job_id and worker.is_alive]
    oldest_first = sorted(workers, key=lambda worker: index_of_worker(worker.worker_id))
    return [worker.node_id for worker in oldest_first[num_kept:]]
