"""Which running jobs have no room left: a worker that has to leave its node cannot be replaced now. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal_service.control.market.build import requested
from shoal_service.core.scheduling.facts import facts_of
from shoal_service.core.scheduling.market import MarketNode
from shoal_service.core.scheduling.room import Room, count
from shoal_service.store.driving import DriveRow


def without_room(
    rows: Sequence[DriveRow], nodes: Sequence[MarketNode], workers: Mapping[str, Mapping[str, int]], now: float
) -> frozenset[str]:
    """The jobs whose granted workers do not all fit on the nodes of their cluster that they may use.

    Workers stay where they are. Then the missing ones are placed, of jobs of higher priority first, then of older ones.

    Args:
        nodes: those that no worker has to leave.
        workers: those that each job really has, by job and node.
    """
    room = Room(nodes, now)
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
