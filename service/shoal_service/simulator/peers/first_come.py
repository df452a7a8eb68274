"""The scheduler that Shoal had before its market: first come, first served, with as many workers as fit."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_service.core.scheduling.market import Decision, MarketState, Resize, Start, Wait
from shoal_service.simulator.peers import first_come_scheduler as former


def first_come(state: MarketState, now: float) -> Sequence[Decision]:
    jobs = [
        former.JobDemand(
            job_id=job.job_id,
            priority=job.priority,
            created_at=job.submitted_at,
            min_workers=job.min_workers,
            max_workers=job.max_workers,
            need=former.WorkerNeed(cpus=job.need.cpus, gpus=job.need.gpus, memory_gib=job.need.memory_gib),
            granted_workers=job.granted,
        )
        for job in state.jobs
    ]
    nodes = [
        former.NodeCapacity(node_id=node.node_id, cpus=node.cpus, gpus=node.gpus, memory_gib=node.memory_gib)
        for node in state.nodes
    ]
    found: list[Decision] = []
    position = 0
    for decision in former.decide(jobs, nodes):
        match decision:
            case former.Start():
                found.append(Start(decision.job_id, decision.workers, decision.reason))
            case former.Grant():
                found.append(Resize(decision.job_id, decision.workers, decision.reason))
            case former.Wait():
                position += 1
                found.append(Wait(decision.job_id, decision.reason, position))
    return found
