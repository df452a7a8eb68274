"""Small markets for the tests of scheduling policies: jobs, nodes, and what is left after decisions are carried out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from shoal_service.core.scheduling.market import (
    Decision,
    MarketJob,
    MarketNode,
    MarketState,
    Preempt,
    Project,
    Resize,
    Start,
    ThroughputCurve,
    Wait,
    WorkerNeed,
)

NOW = 100_000.0
CPU = WorkerNeed(cpus=1.0)
CONCAVE = ThroughputCurve((1, 2, 4, 8, 16), (10.0, 19.0, 34.0, 55.0, 76.0))
"""Each worker adds less than the one before."""


def job(name: str, least: int = 1, most: int = 4, *, granted: int = 0, **fields: Any) -> MarketJob:
    given: dict[str, Any] = {"need": CPU, "curve": CONCAVE, "submitted_at": NOW, "left": 100_000.0, **fields}
    return MarketJob(job_id=name, min_workers=least, max_workers=most, granted=granted, **given)


def nodes(*cpus: float, **fields: Any) -> list[MarketNode]:
    return [MarketNode(node_id=f"node-{at:04}", cpus=amount, **fields) for at, amount in enumerate(cpus)]


def market(jobs: Sequence[MarketJob], cluster: Sequence[MarketNode], *projects: Project, **fields: Any) -> MarketState:
    return MarketState(jobs=jobs, nodes=cluster, projects={one.name: one for one in projects}, **fields)


def carried_out(state: MarketState, decisions: Iterable[Decision], now: float = NOW) -> MarketState:
    """The market once the decisions are in effect. A preempted job may start in any cluster again, but `NAME@CLUSTER`,
    which its spec ties to this one."""
    changed = {one.job_id: one for one in decisions}

    def after(old: MarketJob) -> MarketJob:
        match changed.get(old.job_id):
            case Start(workers=workers, cluster=cluster):
                return replace(old, granted=workers, held=workers, moved_at=now, cluster=cluster)
            case Resize(workers=workers):
                return replace(old, granted=workers, held=workers, moved_at=now)
            case Preempt():
                tied = old.job_id.partition("@")[2]
                return replace(old, granted=0, held=0, moved_at=now, cluster=tied)
            case Wait() | None:
                return old

    return replace(state, jobs=[after(old) for old in state.jobs])


def grants(state: MarketState) -> dict[str, int]:
    """Workers of each job that has any."""
    return {one.job_id: one.granted for one in state.jobs if one.granted}


def reasons(decisions: Iterable[Decision]) -> dict[str, str]:
    return {one.job_id: one.reason for one in decisions}
