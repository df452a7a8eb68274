"""Which running jobs have no room left: a worker that has to leave its node cannot be replaced now. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_service.core.scheduling.market import MarketNode, WorkerNeed
from shoal_service.core.scheduling.room import FreeNode
from shoal_service.store.driving import DriveRow


def without_room(rows: Sequence[DriveRow], nodes: Sequence[MarketNode]) -> frozenset[str]:
    """The jobs whose granted workers do not all fit on these nodes. Jobs of higher priority are placed first, then
    older ones, each on the nodes with the least room."""
    free = [FreeNode(node) for node in nodes if not node.is_cordoned]
    found = set()
    for row in sorted(rows, key=lambda row: (-row.priority, row.created_at, row.id)):
        worker = row.spec.worker
        need = WorkerNeed(cpus=worker.cpus, gpus=worker.gpus, memory_gib=worker.memory_gib)
        missing = row.granted_workers
        for node in sorted(free, key=lambda one: one.fits(need)):
            here = min(missing, node.fits(need))
            node.reserve(need, here)
            missing -= here
        if missing:
            found.add(row.id)
    return frozenset(found)
