"""Today's policy, first come first served, for the types of a market; until the market's own policy replaces it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from shoal_service.core.scheduling import first_come as today
from shoal_service.core.scheduling.market import Decision, MarketNode, MarketState, Resize, Start, Wait, WorkerNeed
from shoal_service.store.driving import DriveRow


def first_come(state: MarketState, now: float) -> list[Decision]:
    demands = [
        today.JobDemand(
            job_id=job.job_id,
            priority=job.priority,
            created_at=job.submitted_at,
            min_workers=job.min_workers,
            max_workers=job.max_workers,
            need=_need(job.need),
            granted_workers=job.granted,
            leaving=job.is_leaving,
        )
        for job in state.jobs
    ]
    made: list[Decision] = []
    for decision in today.decide(demands, _capacity(state.nodes)):
        match decision:
            case today.Start(job_id, workers, reason):
                made.append(Start(job_id, workers, reason))
            case today.Grant(job_id, workers, reason):
                made.append(Resize(job_id, workers, reason))
            case today.Wait(job_id, reason):
                made.append(Wait(job_id, reason, sum(isinstance(one, Wait) for one in made) + 1))
            case _:
                assert_never(decision)
    return made


def without_room(rows: Sequence[DriveRow], nodes: Sequence[MarketNode]) -> frozenset[str]:
    """Jobs whose granted workers do not all fit on these nodes: a worker that has to leave its node cannot be replaced
    now."""
    demands = [
        today.JobDemand(
            job_id=row.id,
            priority=row.priority,
            created_at=row.created_at,
            min_workers=row.spec.elasticity.min_workers,
            max_workers=row.spec.elasticity.max_workers,
            need=today.WorkerNeed(
                cpus=row.spec.worker.cpus, gpus=row.spec.worker.gpus, memory_gib=row.spec.worker.memory_gib
            ),
            granted_workers=row.granted_workers,
        )
        for row in rows
    ]
    return today.without_room(demands, _capacity(nodes))


def _need(need: WorkerNeed) -> today.WorkerNeed:
    return today.WorkerNeed(cpus=need.cpus, gpus=need.gpus, memory_gib=need.memory_gib)


def _capacity(nodes: Sequence[MarketNode]) -> list[today.NodeCapacity]:
    return [
        today.NodeCapacity(node_id=n.node_id, cpus=n.cpus, gpus=n.gpus, memory_gib=n.memory_gib)
        for n in nodes
        if not n.is_cordoned
    ]
