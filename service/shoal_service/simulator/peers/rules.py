"""Projects and priorities for policies that know neither, so that all policies compete under the same rules.

`with_rules` divides the workers among the projects that have jobs: first up to each one's guarantee, then one by one to
the project that has the fewest relative to its weight; never above its limit or above what its jobs can use. Within a
project the jobs of the highest priority choose first. The policy decides for each such group of jobs alone, as if the
workers that are left were a cluster of their own. Parents of projects are not considered.
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
from shoal_service.simulator.peers.allocation import num_workers


def with_rules(policy: Policy) -> Policy:
    """The policy itself where there is one project and one priority."""

    def ruled(state: MarketState, now: float) -> Sequence[Decision]:
        by_project: dict[str, list[MarketJob]] = defaultdict(list)
        for job in state.jobs:
            by_project[job.project if job.project in state.projects else DEFAULT_PROJECT].append(job)
        shares = divide(by_project, state.projects, num_workers(state))
        found: list[Decision] = []
        for name, jobs in by_project.items():
            found += _by_priority(policy, replace(state, jobs=jobs), shares[name], now)
        return found

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


def _by_priority(policy: Policy, state: MarketState, workers: int, now: float) -> list[Decision]:
    found: list[Decision] = []
    for priority in sorted({job.priority for job in state.jobs}, reverse=True):
        jobs = [job for job in state.jobs if job.priority == priority]
        nodes = [MarketNode(node_id="share", cpus=float(workers))]
        decisions = policy(replace(state, jobs=jobs, nodes=nodes), now)
        found += decisions
        workers -= _granted(jobs, decisions)
    return found


def _granted(jobs: Sequence[MarketJob], decisions: Sequence[Decision]) -> int:
    """The workers that these jobs have after the decisions."""
    granted = {job.job_id: job.granted for job in jobs}
    for decision in decisions:
        match decision:
            case Start(job_id=job_id, workers=workers) | Resize(job_id=job_id, workers=workers):
                granted[job_id] = workers
            case Preempt(job_id=job_id):
                granted[job_id] = 0
    return sum(granted.values())
