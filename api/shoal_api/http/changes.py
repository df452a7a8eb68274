"""Changes: coroutines wait here until a job has changed, without a thread or a database connection.

The store calls `notify` after each commit, on the committing thread, and `watch_other_writers` after a commit of
another process. A waiting coroutine reads nothing until then. To miss no change: clear, read, then wait.

    with changes.watching(job_id) as watch:
        while not changes.closing:
            watch.clear()
            ... read the store ...
            await watch.wait_at_most(timeout_s)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.concurrency import run_in_threadpool

from shoal_service.store import Store, StoreUnavailable, histories

CLUSTER = "cluster"
"""Notified, in the place of a job's id, when the nodes have changed."""
NO_JOB = ""
"""The place of a job's id in a watch that no change wakes: only `Changes.close` and its holder do."""
_CLOCKS_APART_S = 60.0
"""Largest difference between the clocks of two control planes."""
_log = logging.getLogger(__name__)


class Changes:
    """One per application; belongs to the event loop that serves it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watches: dict[str | None, set[Watch]] = {}
        self.closing = False
        self._closers: list[Callable[[], None]] = []

    def open(self) -> None:
        """Begin to notify. Call it on the serving loop before the first request."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End every stream and long poll; later waits return immediately. Call it on the serving loop."""
        self.closing = True
        for close in self._closers:
            close()
        for watches in self._watches.values():
            for watch in watches:
                watch.set()

    def when_closed(self, close: Callable[[], None]) -> None:
        """Register a function that `close` calls."""
        self._closers.append(close)

    @property
    def num_watches(self) -> int:
        """Number of open watches of jobs."""
        return sum(len(watches) for job_id, watches in self._watches.items() if job_id != NO_JOB)

    def notify(self, job_id: str) -> None:
        """Wake those who watch the job, whose change is committed. Thread-safe."""
        if self._watches and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: no coroutine waits
                self._loop.call_soon_threadsafe(self._wake, job_id)

    @contextmanager
    def watching(self, job_id: str | None) -> Iterator[Watch]:
        """Watch one job, all jobs (None), or none (NO_JOB)."""
        watch = Watch(self)
        self._watches.setdefault(job_id, set()).add(watch)
        try:
            yield watch
        finally:
            watches = self._watches[job_id]
            watches.remove(watch)
            if not watches:
                del self._watches[job_id]

    def _wake(self, job_id: str) -> None:
        for key in (job_id, None):
            for watch in self._watches.get(key, ()):
                watch.set()


class Watch(asyncio.Event):
    """Set once there was a change since it was cleared. One coroutine waits for it."""

    def __init__(self, changes: Changes) -> None:
        super().__init__()
        self._changes = changes

    async def wait_at_most(self, timeout_s: float) -> bool:
        """Wait for a change, the time-out, or the closing of the application. Return True if there was a change."""
        if not self._changes.closing and timeout_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.wait()
        return self.is_set()


async def watch_other_writers(changes: Changes, store: Store, nodes_of: Callable[[], object], reread_s: float) -> None:
    """Notify what other processes commit, until it is cancelled: one query in `reread_s` seconds for all open streams
    and long polls together, and none without any.

    The store notifies the commits of this process. With several control planes on one database, the one that holds the
    lease writes most changes; the clients of the others learn of them here. `nodes_of` returns the cluster's nodes, on
    a worker thread: they change without a commit.
    """
    known: dict[str, tuple[float, int, int]] = {}
    cluster = None
    while True:
        await asyncio.sleep(reread_s)
        if not changes.num_watches:
            continue
        try:
            newest = max((updated_at for updated_at, *_ in known.values()), default=0.0)
            newest = newest or await run_in_threadpool(store.reading(histories.read_last_change))
            # a control plane whose clock is behind writes older times; jobs that are read again are compared below
            changed = await run_in_threadpool(store.reading(histories.read_changed_jobs), newest - _CLOCKS_APART_S)
            nodes = await run_in_threadpool(nodes_of)
        except StoreUnavailable:
            _log.warning("changes.store_unavailable")
            continue
        for job_id, content in changed.items():
            if known.get(job_id) != content:
                changes.notify(job_id)
        if nodes != cluster:
            changes.notify(CLUSTER)
        known, cluster = changed, nodes
