"""Several clusters for policies that know only one: each cluster is a market of its own.

`per_cluster` puts each queued job into the cluster that has the most workers beyond its grants and beyond the minima of
the jobs that were put there before it, and asks the policy for each cluster. A job that waits may be in another one at
the next call. The limit and the guarantee of a project are what its jobs in the other clusters leave of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal_service.core.scheduling.market import (
    DEFAULT_PROJECT,
    Decision,
    MarketJob,
    MarketState,
    Policy,
    Preempt,
    Project,
    Resize,
    Start,
    Wait,
)
from shoal_service.simulator.peers.allocation import by_age, num_workers


def per_cluster(policy: Policy) -> Policy:
    """The policy itself, within each cluster."""

    def of_clusters(state: MarketState, now: float) -> Sequence[Decision]:
        markets, nowhere = _markets(state)
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


def _markets(state: MarketState) -> tuple[dict[str, MarketState], list[MarketJob]]:
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
