"""What follows from a market beside the decisions: questions of the control loop to which each pass has the answer.

    demand          what to ask of each cluster's autoscaler: room for what jobs have, and for the minima of those
                    that wait
    forecast        what the policy would do with a job that is not submitted
    forecast_move   what it would do with a job that leaves its cluster for the one that it names, and on which nodes
    without_room    running jobs whose workers could not be replaced now
    freed_places    where the workers of a started job will come free

Pure; nothing is stored or carried out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal_service.clusters.wire import Reservation, RoomKind
from shoal_service.control.market.build import MarketBuilder, requested
from shoal_service.core.desired import Desired
from shoal_service.core.scheduling.admission import limit_in_the_way
from shoal_service.core.scheduling.facts import facts_of
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
"""Most workers that are asked of a cluster at a time: Ray gets one entry per worker."""
THIS_JOB = "this job"
"""The id of the job in the words of the decision."""


def demand(state: MarketState, decisions: Sequence[Decision]) -> dict[str, dict[RoomKind, int]]:
    """The number of workers of each kind for which each cluster should have room after these decisions, by name of the
    cluster. Each known cluster has an entry; if none is known, the one entry has the empty name. Nodes beyond that may
    be released. The control loop sends the answer, if `scale_out` is on.

    A waiting job counts only if it could start beside the others that are asked for: nodes do not help against a limit
    of its project, of a project above it, of its user or of its sweep.

    A waiting job that may start in any of several clusters counts in one of them, so that not every autoscaler adds
    nodes for it. It is the cluster whose empty nodes have room for most such workers, which is as a rule where the
    least is missing; the first by name, if several have equal room. That changes only when nodes do, not with the jobs
    on them, so a request does not wander from one autoscaler to another. To have another cluster grow, the job names it
    (`worker.cluster`).
    """
    granted = {job.job_id: job.granted for job in state.jobs}
    granted |= {decision.job_id: decision.workers for decision in decisions if isinstance(decision, Start | Resize)}
    clusters = _Clusters(state, decisions)
    plan = Plan(replace(state, nodes=()), now=0.0)  # limits depend neither on the nodes nor on the time
    entries = {entry.job.job_id: entry for entry in (*plan.leaving, *plan.running, *plan.queued)}
    waiting = [entries[wait.job_id] for wait in sorted(_waits(decisions), key=lambda wait: wait.position)]
    demanded = {name: Counter[RoomKind]() for name in clusters.names}
    running = [entry for job_id, entry in entries.items() if granted[job_id]]
    for entry in running:
        of_cluster = demanded.setdefault(clusters.of(entry.job), Counter())
        _ask(plan, of_cluster, entry, min(granted[entry.job.job_id], entry.job.min_workers))
    for entry in waiting:
        name = clusters.for_waiting(entry.job)
        if name is not None and limit_in_the_way(plan, entry, entry.job.min_workers) is None:
            _ask(plan, demanded.setdefault(name, Counter()), entry, entry.job.min_workers)
    for entry in running:  # workers above a minimum are given to a job that waits, where a limit has no room for both
        above = granted[entry.job.job_id] - entry.charged
        _ask(plan, demanded[clusters.of(entry.job)], entry, int(min(above, max(0, entry.share.room()))))
    return {name: dict(of_cluster) for name, of_cluster in demanded.items()}


class _Clusters:
    """Chooses the cluster in which a job counts."""

    def __init__(self, state: MarketState, decisions: Sequence[Decision]) -> None:
        self._room = Room(state.nodes)
        closed = {name for name, cluster in state.clusters.items() if cluster is not ClusterState.OPEN}
        self.names = sorted({*self._room.clusters, *state.clusters}) or [""]
        self._open = [name for name in self.names if name not in closed]
        self._starts = {decision.job_id: decision.cluster for decision in decisions if isinstance(decision, Start)}

    def of(self, job: MarketJob) -> str:
        """The cluster of a job that has workers, or starts."""
        return self._starts.get(job.job_id, "") or job.cluster or self.names[0]

    def for_waiting(self, job: MarketJob) -> str | None:
        """The cluster of a job that waits; None if no cluster in which it may start takes jobs."""
        names = [name for name in self._open if name not in job.excluded_clusters and job.cluster in ("", name)]
        if len(names) < 2:
            return names[0] if names else None
        room = {shape.cluster: shape.ever for shape in self._room.choices(job, facts_of(job))}
        return max(names, key=lambda name: room.get(name, 0))  # of equal ones the first


def _ask(plan: Plan, demanded: Counter[RoomKind], entry: Entry, workers: int) -> None:
    if demanded.total() + workers <= MAX_WORKERS and workers:
        labels = label_selector(entry.job.selector, entry.job.capacity)
        demanded[RoomKind(entry.job.need, tuple(sorted(labels.items())))] += workers
        plan.charge(entry, entry.charged + workers)


def _waits(decisions: Sequence[Decision]) -> list[Wait]:
    return [decision for decision in decisions if isinstance(decision, Wait) and not decision.waits_for_limit]


def forecast(
    market: MarketState, spec: JobSpec, profiles: tuple[HardwareProfile, ...], policy: Policy, now: float
) -> StartForecast:
    """Tell whether the job would start now, or wait, and until when: the present market with one job more, and the
    policy that decides about real jobs. For `submit --dry-run`. Blocks for a decision, and for the prediction of the
    job's throughput."""
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
    return _start_of(job, replace(market, jobs=[*market.jobs, job]), policy, now)


def forecast_move(
    market: MarketState, job_id: str, to: str, policy: Policy, now: float
) -> tuple[StartForecast, dict[str, WorkerNeed]]:
    """Tell whether a job with workers would start now in this cluster, if its present attempt had ended, and what it
    would take of each node there, by node id. Block for a decision."""
    [job] = [job for job in market.jobs if job.job_id == job_id]
    others = [other for other in market.jobs if other is not job]
    job = replace(job, granted=0, held=0, on_nodes={}, cluster=to, is_leaving=False)
    start = _start_of(job, replace(market, jobs=[*others, job]), policy, now)
    room = Room(market.nodes)
    there = room.shape(job, facts_of(job))
    for other, shape in [(other, room.shape(other, facts_of(other))) for other in others if other.granted]:
        shape.stay(max(other.granted, other.held), other.on_nodes)
    taken = there.take(start.workers or 0)
    kept = {free.node.node_id: WorkerNeed().plus(job.need, workers) for free, workers in taken}
    return start, kept


def _start_of(job: MarketJob, market: MarketState, policy: Policy, now: float) -> StartForecast:
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


def without_room(
    rows: Sequence[DriveRow], nodes: Sequence[MarketNode], workers: Mapping[str, Mapping[str, int]]
) -> frozenset[str]:
    """The jobs whose granted workers do not all fit on the nodes of their cluster that they may use: one that has to
    leave its node cannot be replaced now.

    Workers stay where they are. Then the missing ones are placed, of jobs of higher priority first, then of older ones.

    Args:
        nodes: those that no worker has to leave.
        workers: those that each job really has, by job and node.
    """
    room = Room(nodes)
    jobs = [
        replace(requested(row), cluster=row.cluster)
        for row in sorted(rows, key=lambda row: (-row.priority, row.created_at, row.id))
    ]
    shapes = [room.shape(job, facts_of(job)) for job in jobs]
    known = {node.node_id for node in nodes}
    missing = []
    for job, shape in zip(jobs, shapes, strict=True):
        there = {node_id: num for node_id, num in workers.get(job.job_id, {}).items() if node_id in known}
        staying = min(job.granted, sum(there.values()))
        missing.append(job.granted - (count(shape.stay(staying, there)) if staying else 0))
    return frozenset(
        job.job_id
        for job, shape, num_missing in zip(jobs, shapes, missing, strict=True)
        if count(shape.take(num_missing)) < num_missing
    )


def freed_places(
    changes: Sequence[Start | Resize | Preempt], grants: Mapping[str, int], reservations: Sequence[Reservation]
) -> dict[str, Counter[str]]:
    """The places that other jobs give back, for each job that starts: number of workers by node id, at most as many as
    the job starts with. If a job gets free places instead, it has fewer workers here, or no entry.

    It is a guess, from which processes are started ahead of time: a job that shrinks gives up the workers of its last
    ranks, which are as a rule the newest.

    Args:
        grants: of each job before the changes.
    """
    places = [place for change in changes for place in _given_up(change, grants, reservations)]
    freed: dict[str, Counter[str]] = {}
    for change in changes:
        if isinstance(change, Start) and places:
            freed[change.job_id] = Counter(places[: change.workers])
            places = places[change.workers :]
    return freed


def _given_up(
    change: Start | Resize | Preempt, grants: Mapping[str, int], reservations: Sequence[Reservation]
) -> list[str]:
    """The node of each worker that the job gives up."""
    if isinstance(change, Start):
        return []
    kept = change.workers if isinstance(change, Resize) else 0
    if kept >= grants.get(change.job_id, 0):
        return []
    mine = [reservation for reservation in reservations if reservation.job_id == change.job_id and reservation.is_alive]
    oldest_first = sorted(mine, key=lambda worker: index_of_worker(worker.worker_id))
    return [worker.node_id for worker in oldest_first[kept:]]
