"""Ends an attempt's workers: collects their last reports, removes snapshots, kills. Called by the executor."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from shoal_service.clock import Clock
from shoal_service.core.attempt.large_groups import later_s
from shoal_service.supervisor.protocols import Fleet, WorkerCallError
from shoal_service.supervisor.workers.worker_client import WorkerClient

_FORGET_S = 2.0
_LAST_POLL_S = 5.0


async def release_workers(
    fleet: Fleet, clock: Clock, clients: Sequence[WorkerClient], killing: Collection[asyncio.Task[None]]
) -> None:
    """Collects the last output of each worker, removes the attempt's snapshots from each node, kills the workers.

    If a worker is not idle, one worker per node stays until all others have ended, and removes the snapshots once more:
    a worker that was starting or training may have created some in the meantime. Idle workers are killed together,
    since another job may wait for their resources.

    Args:
        killing: kills that are under way; also waited for.
    """
    queued_s = later_s(len(clients))
    await asyncio.gather(*(client.collect_last_reports(_LAST_POLL_S + queued_s) for client in clients))
    forgetting = (_forget_memory(fleet, clock, i, _FORGET_S + queued_s) for i in fleet.by_node().values())
    answers = await asyncio.gather(*forgetting)
    if not killing and all(client.is_idle for client in clients):
        await asyncio.gather(*(fleet.kill(client.index) for client in clients))
        return
    last = [index for index in answers if index is not None]
    others = [client.index for client in clients if client.index not in last]
    await asyncio.gather(*map(fleet.kill, others), *killing)
    await asyncio.gather(*(_forget_memory(fleet, clock, [index], _FORGET_S + queued_s) for index in last))
    await asyncio.gather(*map(fleet.kill, last))


async def _forget_memory(fleet: Fleet, clock: Clock, indexes: list[int], limit_s: float) -> int | None:
    """Remove a node's snapshots through one of its workers. The index of that worker; None: no worker answered.

    Args:
        limit_s: for the answer of each.
    """
    for index in indexes:
        try:
            await clock.wait_for(fleet.forget_memory(index), limit_s)
            return index
        except (WorkerCallError, TimeoutError):
            continue
    return None
