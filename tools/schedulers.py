"""POLICIES: every policy that `make bench-schedule` compares, by name.

`shoal` is the service's policy. Its peers are other schedulers: rigid ones (first come, FIFO, SRTF, Tiresias) and
elastic ones (max-min, Optimus, SRPT). They know nodes of one kind, workers of one CPU and one cluster; none of them
knows projects, and only first-come priorities. So that all compete under the same rules, `NamedPolicy.run` puts rules
about projects and priorities around them (`with_rules`), and makes each of several clusters a market of its own
(`per_cluster`).
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import (
    DEFAULT_PROJECT,
    Decision,
    MarketJob,
    MarketNode,
    MarketState,
    Policy,
    Preempt,
    Project,
    Resize,
    Start,
    ThroughputCurve,
    Wait,
)
from shoal_service.simulator.engine import Market, Progress, SimulationResult, simulate
from shoal_service.simulator.traces import TraceJob

QUEUE_LIMITS_S = (3_600.0, 36_000.0)
"""Worker-seconds after which a job leaves the first and the second queue of Tiresias."""
EVERY_S = 60.0
"""A job that sinks is no event, so the policy looks once a minute, as Tiresias does."""


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy, which may have to know what users asked for."""

    build: Callable[[Sequence[TraceJob]], Policy]
    has_rules: bool = False
    """It has rules of its own about projects or priorities; around the others `with_rules` can be put."""
    knows_clusters: bool = False
    """It says in which of several clusters a job starts; around the others `per_cluster` is put."""
    every_s: float | None = None
    """It must be called at least so often; None: at events only."""

    def run(
        self, jobs: Sequence[TraceJob], market: Market, *, use_rules: bool = False, progress: Progress | None = None
    ) -> SimulationResult:
        """Raises PolicyError. `use_rules`: projects and priorities hold for a policy without rules of its own, too."""
        # The shorter of the two intervals between regular calls holds.
        intervals = [every_s for every_s in (self.every_s, market.every_s) if every_s]
        market = replace(market, every_s=min(intervals, default=None))
        policy = self.build(jobs)
        if use_rules and not self.has_rules:
            policy = with_rules(policy)
        if market.capacity.clusters and not self.knows_clusters:
            policy = per_cluster(policy)
        return simulate(jobs, policy, market, progress=progress)


def with_rules(policy: Policy) -> Policy:
    """Projects and priorities for a policy that knows neither; the policy itself where there is one of each.

    The workers are divided among the projects that have jobs: first up to each one's guarantee, then one by one to the
    project that has the fewest relative to its weight; never above its limit or above what its jobs can use. Within a
    project the jobs of the highest priority choose first. The policy decides for each such group of jobs alone, as if
    the workers that are left were a cluster of their own. Workers that no project can use are offered to the jobs that
    wait. Parents of projects are not considered.
    """

    def ruled(state: MarketState, now: float) -> Sequence[Decision]:
        by_project: dict[str, list[MarketJob]] = defaultdict(list)
        for job in state.jobs:
            by_project[job.project if job.project in state.projects else DEFAULT_PROJECT].append(job)
        workers = num_workers(state)
        shares = divide_among_projects(by_project, state.projects, workers)
        wanted: dict[str, int] = {}
        for name, jobs in by_project.items():
            wanted |= _choose(policy, replace(state, jobs=jobs), shares[name], now)
        return decisions(state, wanted | _borrow(policy, state, by_project, wanted, now))

    return ruled


def divide_among_projects(
    by_project: Mapping[str, Sequence[MarketJob]], projects: Mapping[str, Project], workers: int
) -> dict[str, int]:
    """The workers of each project that has jobs."""
    rules = {name: projects.get(name, Project(name=name)) for name in by_project}
    most = {name: sum(job.max_workers for job in jobs) for name, jobs in by_project.items()}
    for name, project in rules.items():
        if project.limit is not None:
            most[name] = min(most[name], project.limit)
    shares = dict.fromkeys(by_project, 0)
    guaranteed = {name: min(rules[name].guaranteed, most[name]) for name in rules}
    for bounds in (guaranteed, most):
        heap = [(shares[name] / rules[name].weight, name) for name in rules if shares[name] < bounds[name]]
        heapq.heapify(heap)
        while workers and heap:
            _, name = heapq.heappop(heap)
            shares[name] += 1
            workers -= 1
            if shares[name] < bounds[name]:
                heapq.heappush(heap, (shares[name] / rules[name].weight, name))
    return shares


def _borrow(
    policy: Policy,
    state: MarketState,
    by_project: Mapping[str, Sequence[MarketJob]],
    wanted: Mapping[str, int],
    now: float,
) -> dict[str, int]:
    """Jobs that wait although workers are free. Without this, rigid jobs that need more than the share of their project
    could all wait for each other."""
    free = num_workers(state) - sum(wanted.values())
    found: dict[str, int] = {}
    used = {name: sum(wanted.get(job.job_id, 0) for job in jobs) for name, jobs in by_project.items()}
    for name in sorted(by_project, key=lambda name: (used[name], name)):
        limit = state.projects[name].limit if name in state.projects else None
        room = free if limit is None else min(free, limit - used[name])
        waiting = [job for job in by_project[name] if not wanted.get(job.job_id)]
        if room > 0 and waiting:
            chosen = _choose(policy, replace(state, jobs=waiting), room, now)
            free -= sum(chosen.values())
            found |= chosen
    return found


def _choose(policy: Policy, state: MarketState, workers: int, now: float) -> dict[str, int]:
    """How many workers each of these jobs gets, out of `workers`."""
    wanted: dict[str, int] = {}
    for priority in sorted({job.priority for job in state.jobs}, reverse=True):
        jobs = [job for job in state.jobs if job.priority == priority]
        nodes = [MarketNode(node_id="share", cpus=float(workers))]
        chosen = _granted(jobs, policy(replace(state, jobs=jobs, nodes=nodes), now))
        wanted |= chosen
        workers -= sum(chosen.values())
    return wanted


def _granted(jobs: Sequence[MarketJob], decided: Sequence[Decision]) -> dict[str, int]:
    """The workers that these jobs have after the decisions."""
    granted = {job.job_id: job.granted for job in jobs}
    for decision in decided:
        match decision:
            case Start(job_id=job_id, workers=workers) | Resize(job_id=job_id, workers=workers):
                granted[job_id] = workers
            case Preempt(job_id=job_id):
                granted[job_id] = 0
    return granted


def per_cluster(policy: Policy) -> Policy:
    """Several clusters for a policy that knows only one: each cluster is a market of its own.

    Each queued job is put into the cluster that has the most workers beyond its grants and beyond the minima of the
    jobs that were put there before it, and the policy is asked for each cluster. A job that waits may be in another one
    at the next call. The limit and the guarantee of a project are what its jobs in the other clusters leave of them.
    """

    def of_clusters(state: MarketState, now: float) -> Sequence[Decision]:
        markets, nowhere = _by_cluster(state)
        granted = {job.job_id: job.granted for job in state.jobs}
        project_of = {job.job_id: _project(job, state.projects) for job in state.jobs}
        found: list[Decision] = []
        for name, market in markets.items():
            here = {job.job_id for job in market.jobs}
            elsewhere = dict.fromkeys(state.projects, 0)
            for job_id, workers in granted.items():
                if job_id not in here and project_of[job_id] in elsewhere:
                    elsewhere[project_of[job_id]] += workers
            projects = {key: _rest(project, elsewhere[key]) for key, project in state.projects.items()}
            for one in policy(replace(market, projects=projects), now):
                found.append(one._replace(cluster=name) if isinstance(one, Start) else one)
                if isinstance(one, Start | Resize):
                    granted[one.job_id] = one.workers
                elif isinstance(one, Preempt):
                    granted[one.job_id] = 0
        changes = [one for one in found if not isinstance(one, Wait)]
        waits = [one for one in found if isinstance(one, Wait)]
        waits += [Wait(job.job_id, "No cluster that it may run in has nodes.", 0) for job in nowhere]
        return [*changes, *(one._replace(position=position) for position, one in enumerate(waits, 1))]

    return of_clusters


def _by_cluster(state: MarketState) -> tuple[dict[str, MarketState], list[MarketJob]]:
    """Each cluster with its jobs, without those of clusters that are lost; and the queued jobs that have none."""
    nodes = {name: [node for node in state.nodes if node.cluster == name] for name in _names(state)}
    jobs: dict[str, list[MarketJob]] = {name: [] for name in nodes}
    room = {name: num_workers(replace(state, nodes=found)) for name, found in nodes.items()}
    nowhere = []
    for job in sorted(state.jobs, key=lambda job: (not job.granted, *by_age(job))):
        if job.is_leaving:
            continue
        allowed = [name for name in nodes if job.cluster in ("", name)]
        if not allowed:
            nowhere += [] if job.granted else [job]
            continue
        name = max(allowed, key=lambda name: room[name])
        jobs[name].append(job)
        room[name] -= job.granted or job.min_workers
    return {name: replace(state, jobs=jobs[name], nodes=nodes[name]) for name in nodes}, nowhere


def _names(state: MarketState) -> list[str]:
    running = {job.cluster for job in state.jobs if job.granted and not job.is_leaving}
    return sorted({node.cluster for node in state.nodes} | running)


def _project(job: MarketJob, projects: Mapping[str, Project]) -> str:
    return job.project if job.project in projects else DEFAULT_PROJECT


def _rest(project: Project, elsewhere: int) -> Project:
    limit = None if project.limit is None else max(0, project.limit - elsewhere)
    return replace(project, limit=limit, guaranteed=max(0, project.guaranteed - elsewhere))


def first_come(state: MarketState, now: float) -> Sequence[Decision]:
    """First come, first served, all or nothing, as Shoal did before its market.

        1 A running job above its max_workers is shrunk. Its workers count as free from the next decision on.
        2 A running job below its min_workers gets those before any other job gets workers.
        3 The queue, by priority and age: a job starts when its min_workers fit, with as many workers as fit, up to its
          max_workers. The first job that does not fit blocks those behind it, so small jobs cannot starve a large one.
        4 Running jobs grow to max_workers, but only while no job waits that could ever run.

    Free is what nodes have minus what running jobs were *granted*: a job that has just lost a node keeps its claim, and
    no job grows until the grants fit again. A job that does not fit into the empty cluster waits, and blocks no other.
    Nothing is preempted.
    """
    present = [job for job in state.jobs if job.granted or not job.is_leaving]
    ordered = sorted(present, key=lambda job: (-job.priority, *by_age(job)))
    staying = [job for job in ordered if job.granted and not job.is_leaving]
    most = num_workers(state)
    left = most - sum(job.granted for job in ordered)
    free, is_blocked = max(0, left), False
    wanted = {job.job_id: job.granted for job in ordered}
    for job in staying:
        missing = job.min_workers - job.granted
        if missing > free:
            is_blocked = True
            break
        if missing > 0:
            free -= missing
            wanted[job.job_id] = job.min_workers
    for job in ordered:
        if job.granted or is_blocked:
            continue
        if free >= job.min_workers:
            wanted[job.job_id] = min(free, job.max_workers)
            free -= wanted[job.job_id]
        else:
            is_blocked = job.min_workers <= most
    for job in staying:
        if job.granted > job.max_workers:
            wanted[job.job_id] = job.max_workers
        elif not is_blocked and left >= 0 and job.granted >= job.min_workers:
            extra = min(free, job.max_workers - job.granted)
            wanted[job.job_id] += extra
            free -= extra
    return decisions(replace(state, jobs=ordered), wanted)


Order = Callable[[MarketJob], tuple[object, ...]]
"""Sort key of jobs; the first one is served first."""


def rigid(jobs: Sequence[TraceJob], order: Callable[[Mapping[str, int]], Order], *, may_pass: bool) -> Policy:
    """Jobs get the number of workers that they ask for, or none. `order` is made from these numbers, by job id. After a
    job that does not fit, others get workers only if they may pass it."""
    requested = {job.job_id: job.asked_workers for job in jobs}
    key = order(requested)

    def policy(state: MarketState, now: float) -> Sequence[Decision]:
        free = num_workers(state)
        wanted: dict[str, int] = {}
        for job in sorted(state.jobs, key=key):
            workers = requested[job.job_id]
            if workers <= free:
                wanted[job.job_id] = workers
                free -= workers
            elif not may_pass:
                break
        return decisions(state, wanted)

    return policy


def fifo(requested: Mapping[str, int]) -> Order:
    """The order of submission, running jobs first: the default of most batch systems. Nothing is preempted as long as
    no node leaves."""
    return lambda job: (not job.granted, *by_age(job))


def srtf(requested: Mapping[str, int]) -> Order:
    """The shortest remaining time first; the others are preempted."""
    return lambda job: ((job.left or 0.0) / job.curve.rate(requested[job.job_id]), job.job_id)


def attained_service(requested: Mapping[str, int]) -> Order:
    """Least attained service (Tiresias, NSDI 2019): three queues by the worker-seconds that a job had.

    A job starts in the first queue and sinks as it is served. The workers go to the first queue before the second, and
    within a queue to the oldest job; the others are preempted. No knowledge of remaining work is needed.
    """
    return lambda job: (sum(job.served_s >= limit for limit in QUEUE_LIMITS_S), *by_age(job))


Gain = Callable[[MarketJob, int], float]
"""Value of one more worker than this number for a job."""


def greedy(gain: Gain) -> Policy:
    """Each job gets its minimum, the oldest first while they fit; the rest goes one by one where the gain is largest,
    while there is any."""

    def policy(state: MarketState, now: float) -> Sequence[Decision]:
        free = num_workers(state)
        wanted: dict[str, int] = {}
        heap: list[tuple[float, float, str, MarketJob]] = []
        for job in sorted(state.jobs, key=by_age):
            if job.min_workers > free:
                continue
            free -= job.min_workers
            wanted[job.job_id] = job.min_workers
            if job.max_workers > job.min_workers:
                heap.append((-gain(job, job.min_workers), *by_age(job), job))
        heapq.heapify(heap)
        while free and heap and heap[0][0] < 0:
            *_, job = heapq.heappop(heap)
            workers = wanted[job.job_id] = wanted[job.job_id] + 1
            free -= 1
            if workers < job.max_workers:
                heapq.heappush(heap, (-gain(job, workers), *by_age(job), job))
        return decisions(state, wanted)

    return policy


def _seconds_saved(job: MarketJob, workers: int) -> float:
    left = job.left or 0.0
    return left / job.curve.rate(workers) - left / job.curve.rate(workers + 1)


def _relative_speed(job: MarketJob, workers: int) -> float:
    rates = concave_rates(job.curve, job.max_workers)
    return (rates[workers + 1] - rates[workers]) / max(job.left or 0.0, 1e-9)


@lru_cache(maxsize=1024)
def concave_rates(curve: ThroughputCurve, most: int) -> tuple[float, ...]:
    """The least concave function above the curve, at 0 to `most` workers.

    Where a curve has a step ahead, the workers before it are worth their share of it; without this, a greedy policy
    stops in front of every step.
    """
    corners: list[tuple[int, float]] = []
    for point in ((size, curve.rate(size)) for size in range(most + 1)):
        while len(corners) >= 2 and _is_below(corners[-1], corners[-2], point):
            corners.pop()
        corners.append(point)
    rates = [corners[0][1]]
    for (left, low), (right, high) in pairwise(corners):
        rates += [low + (high - low) * (size - left) / (right - left) for size in range(left + 1, right + 1)]
    return tuple(rates)


def _is_below(middle: tuple[int, float], left: tuple[int, float], right: tuple[int, float]) -> bool:
    """The middle point is on or below the line from the left to the right one."""
    return (middle[1] - left[1]) * (right[0] - left[0]) <= (right[1] - left[1]) * (middle[0] - left[0])


def num_workers(state: MarketState) -> int:
    """The workers that fit: peers know nodes of one kind, and workers that need one CPU."""
    return sum(math.floor(node.cpus) for node in state.nodes)


def decisions(state: MarketState, wanted: Mapping[str, int]) -> list[Decision]:
    """Decisions after which each job has the workers that `wanted` has for it; 0 for a job that it does not have."""
    result: list[Decision] = []
    position = 0
    for job in state.jobs:
        workers = wanted.get(job.job_id, 0)
        if workers == job.granted:
            if not workers:
                position += 1
                result.append(Wait(job.job_id, "", position))
        elif not job.granted:
            result.append(Start(job.job_id, workers, ""))
        elif not workers:
            result.append(Preempt(job.job_id, "", beneficiary=""))
        else:
            result.append(Resize(job.job_id, workers, ""))
    return result


def by_age(job: MarketJob) -> tuple[float, str]:
    return job.submitted_at, job.job_id


max_min = greedy(lambda job, workers: 1 / workers)
"""Equal numbers of workers, whatever they are worth."""
optimus = greedy(_seconds_saved)
"""A worker goes where it saves most seconds of remaining time (EuroSys 2018). Long jobs gain most."""
elastic_srpt = greedy(_relative_speed)
"""A worker goes where it adds the largest share of the remaining work per second, so that the jobs that can be finished
soonest are: SRPT (shortest remaining processing time) for jobs that run faster on more workers."""

POLICIES: dict[str, NamedPolicy] = {
    "shoal": NamedPolicy(lambda jobs: decide, has_rules=True, knows_clusters=True),
    "first-come": NamedPolicy(lambda jobs: first_come, has_rules=True),
    "fifo-gang": NamedPolicy(lambda jobs: rigid(jobs, fifo, may_pass=False)),
    "srtf-gang": NamedPolicy(lambda jobs: rigid(jobs, srtf, may_pass=True)),
    "tiresias": NamedPolicy(lambda jobs: rigid(jobs, attained_service, may_pass=True), every_s=EVERY_S),
    "max-min": NamedPolicy(lambda jobs: max_min),
    "optimus": NamedPolicy(lambda jobs: optimus),
    "elastic-srpt": NamedPolicy(lambda jobs: elastic_srpt),
}
