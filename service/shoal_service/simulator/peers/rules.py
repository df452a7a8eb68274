"""Projects and priorities for policies that know neither, so that all policies compete under the same rules.

`with_rules` divides the workers among the projects that have jobs: first up to each one's guarantee, then one by one to
the project that has the fewest relative to its weight; never above its limit or above what its jobs can use. Within a
project the jobs of the highest priority choose first. The policy decides for each such group of jobs alone, as if the
workers that are left were a cluster of their own. Workers that no project can use are offered to the jobs that wait.
Parents of projects are not considered.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
)
from shoal_service.simulator.peers.allocation import decisions, num_workers


def with_rules(policy: Policy) -> Policy:
    """The policy itself where there is one project and one priority."""

    def ruled(state: MarketState, now: float) -> Sequence[Decision]:
        by_project: dict[str, list[MarketJob]] = defaultdict(list)
        for job in state.jobs:
            by_project[job.project if job.project in state.projects else DEFAULT_PROJECT].append(job)
        workers = num_workers(state)
        shares = divide(by_project, state.projects, workers)
        wanted: dict[str, int] = {}
        for name, jobs in by_project.items():
            wanted |= _choose(policy, replace(state, jobs=jobs), shares[name], now)
        return decisions(
            state, wanted | _borrow(policy, state, by_project, wanted, now), "As the project's share permits"
        )

    return ruled


def divide(
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
