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

    def is_under_way(self, cluster: str, kind: str) -> bool:
        task = self._tasks.get((cluster, kind))
        return task is not None and not task.done()

    def begin(self, cluster: str, kind: str, errand: Callable[[], Awaitable[object]]) -> bool:
        """Begin an errand. False: the last one of that kind is not done. What it raises is logged."""
        if self.is_under_way(cluster, kind):
            return False
        self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}
        self._tasks[cluster, kind] = asyncio.create_task(self._run(cluster, kind, errand), name=f"{kind} {cluster}")
        return True

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
