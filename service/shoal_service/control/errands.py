"""Errands: requests of the control loop to clusters whose answers it does not wait for. One of a kind and cluster at a
time.

A cluster that does not answer must not hold up a pass, which is about all clusters. What an errand was meant to do is
done by a later one, with the next pass. Used on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shoal_service.cluster.errors import ClusterUnreachable
from shoal_service.store import LeaseLost

_log = logging.getLogger(__name__)


class Errands:
    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def begin(self, cluster: str, kind: str, errand: Callable[[], Awaitable[object]]) -> asyncio.Task[None] | None:
        """Begin an errand, and return its task; None if the last one of that kind is not done. What it raises is
        logged."""
        self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}
        if (cluster, kind) in self._tasks:
            return None
        task = asyncio.create_task(self._run(cluster, kind, errand), name=f"{kind} {cluster}")
        self._tasks[cluster, kind] = task
        return task

    def num_under_way(self, cluster: str) -> int:
        """Return the number of errands to the cluster that are not done."""
        return sum(to == cluster and not task.done() for (to, _), task in self._tasks.items())

    def drop(self) -> None:
        """Cancel all errands."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _run(self, cluster: str, kind: str, errand: Callable[[], Awaitable[object]]) -> None:
        try:
            await errand()
        except (ClusterUnreachable, LeaseLost) as error:
            _log.warning("cluster.errand_failed", extra={"cluster": cluster, "kind": kind, "error": str(error)})
        except Exception:
            _log.exception("cluster.errand_failed", extra={"cluster": cluster, "kind": kind})
