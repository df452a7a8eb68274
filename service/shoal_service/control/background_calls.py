"""Background calls: requests of the control loop to clusters whose answers it does not wait for. One of a kind and
cluster at a time.

A cluster that does not answer must not hold up a pass, which is about all clusters. What a call was meant to do is
done by a later one, with the next pass. A failure is logged when it differs from the one before. Used on the event
loop. `Threads` is for calls that block: a few threads of their own, so that those that hang hold up no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from shoal_service.cluster.errors import ClusterUnreachable
from shoal_service.store import LeaseLost

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class BackgroundCalls:
    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._failures: dict[tuple[str, str], str] = {}
        """What the last call has raised, by cluster and kind; absent if it has succeeded."""

    def begin(self, cluster: str, kind: str, call: Callable[[], Awaitable[object]]) -> asyncio.Task[None] | None:
        """Begin a call, and return its task; None if the last one of that kind is not done. What it raises is
        logged."""
        self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}
        if (cluster, kind) in self._tasks:
            return None
        task = asyncio.create_task(self._run(cluster, kind, call), name=f"{kind} {cluster}")
        self._tasks[cluster, kind] = task
        return task

    def count_pending(self, cluster: str) -> int:
        """Return the number of calls to the cluster that are not done."""
        return sum(to == cluster and not task.done() for (to, _), task in self._tasks.items())

    def drop(self) -> None:
        """Cancel all calls."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _run(self, cluster: str, kind: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
            self._failures.pop((cluster, kind), None)
        except Exception as error:
            before, self._failures[cluster, kind] = self._failures.get((cluster, kind)), repr(error)
            if before != repr(error):
                is_expected = isinstance(error, ClusterUnreachable | LeaseLost)
                _log.log(
                    logging.WARNING if is_expected else logging.ERROR,
                    "cluster.call_failed",
                    extra={"cluster": cluster, "kind": kind, "error": str(error)},
                    exc_info=not is_expected,
                )


class Threads:
    """Threads for calls that block. Each call runs to its end; its caller may give up before."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def __call__(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Make the call on one of the threads, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *arguments, **named))

    def close(self) -> None:
        """Start no call that still waits for a thread."""
        self._pool.shutdown(cancel_futures=True)
