"""JobStorage: reads and deletes files of jobs for people. The storage may hang, so it has threads of its own.

    HTTP edge  --- await --->  one of NUM_THREADS threads  --->  the job's directory, <checkpoint.url>/<job id>

The directory follows from the spec and the server's settings, never from what a worker has reported, and no symbolic
link in it is followed: a job's code must not choose which files the server reads. Used on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal_service.supervisor.checkpoints.catalog import CheckpointCatalog
from shoal_service.supervisor.config import checkpoint_root
from shoal_service.views import JobView
from shoal_workers.checkpoint.storage import Directory, open_job_directory
from shoal_workers.contract.profiles import FOLDER, name_of

T = TypeVar("T")
_NUM_THREADS = 4
_ANSWER_S = 20.0
_PIECE_BYTES = 1 << 20


class StorageAway(Exception):
    """The storage cannot be reached from the server, or does not answer; the message is one line."""


class JobStorage:
    def __init__(self, default_url: str) -> None:
        """`default_url`: the checkpoint directory of jobs without a `checkpoint.url`; empty: they cannot be read."""
        self._default_url = default_url
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="storage")

    def catalog(self, job: JobView) -> CheckpointCatalog:
        """The checkpoints of a job. Raises StorageAway."""
        return CheckpointCatalog(self._root(job))

    def root(self, job: JobView) -> str:
        """URL of the job's directory; empty: this server does not know it."""
        try:
            return self._root(job)
        except StorageAway:
            return ""

    async def profile_file(self, job: JobView, number: int, name: str) -> tuple[int, AsyncIterator[bytes]] | None:
        """Length and content of a file of a profile; None: it is not there any more. `name` must be a valid one.

        Raises:
            StorageAway: also while the content is read.
        """
        place = open_job_directory(self._root(job)).child(FOLDER).child(name_of(number))
        try:
            length = (await self.run(place.files)).get(name)
        except FileNotFoundError:
            return None
        return None if length is None else (length, self._pieces(place, name, length))

    async def run(self, work: Callable[[], T], *, within_s: float = _ANSWER_S) -> T:
        """The result of a blocking call, from one of the threads. Raises StorageAway, FileNotFoundError."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.wait_for(asyncio.shield(future), within_s)
        except TimeoutError:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, whatever it is
            raise StorageAway(f"the storage did not answer within {within_s:g} s") from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageAway(f"the server cannot use the storage: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Waits for no thread: one that hangs in the storage cannot be ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _root(self, job: JobView) -> str:
        if not (job.spec.checkpoint.url or self._default_url):
            raise StorageAway("this server has no checkpoint directory (SHOAL_CHECKPOINT_URL)")
        return checkpoint_root(job.spec, self._default_url, job.id)

    async def _pieces(self, place: Directory, name: str, length: int) -> AsyncIterator[bytes]:
        at = 0
        while at < length:
            buffer = bytearray(min(_PIECE_BYTES, length - at))
            count = await self.run(lambda at=at, buffer=buffer: place.read_into(name, at, memoryview(buffer)))  # type: ignore[misc]
            if not count:
                raise StorageAway(f"{name} became shorter while it was read")
            yield bytes(buffer[:count])
            at += count
