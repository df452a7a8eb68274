"""Fetches the shards of the present block and of the next ones ahead of training, on threads of this process.

    window     shards of the present block | of the next | of the one after it        moves on with the block
    threads    the first one of the window that is neither here, nor being fetched, nor failed a moment ago

All processes of a node do this in the same cache: what one of them fetches the others pass over, and take over if that
process is killed. A shard of the window is never deleted for a later one, so the window is filled as far as the cache
allows. What fails is logged and tried again later, and never ends training: the read that needs the shard says what is
wrong.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence

from shoal_workers.data.errors import DataError
from shoal_workers.data.streaming.cache import NoClaim

_log = logging.getLogger(__name__)
_AGAIN_S: dict[NoClaim | None, float] = {NoClaim.FETCHED_BY_OTHER: 0.25, NoClaim.FULL: 1.0}
_FAILED_AGAIN_S = 2.0
PATIENCE_S = 10.0
"""How long one try of a fetch asks a store that does not answer."""

Fetch = Callable[[int, Collection[int]], NoClaim | None]
"""Arguments: a shard, and the shards that must not be deleted for it."""


class Window:
    """Chooses the shard to fetch next. Not thread-safe."""

    def __init__(self) -> None:
        self.shards: list[int] = []
        self.num_present = 0
        """How many of them belong to the present block."""
        self._next_try: dict[int, float] = {}
        """When a shard may be tried again; infinite if it is here, or being fetched."""
        self._full_until = 0.0

    def move(self, blocks: Sequence[Sequence[int]], first: int) -> None:
        """Begin a new window. `first`: where to begin in each block; processes that begin apart seldom collide."""
        self.shards = [block[(first + at) % len(block)] for block in blocks for at in range(len(block))]
        self.num_present = len(blocks[0]) if blocks else 0
        kept = set(self.shards)
        self._next_try = {shard: at for shard, at in self._next_try.items() if shard in kept}
        self._full_until = 0.0

    def next(self, now: float) -> int | None:
        """Take a shard, which then counts as being fetched; None if there is nothing to do before `wake_at`."""
        if now < self._full_until:
            return None
        for shard in self.shards:
            if self._next_try.get(shard, 0.0) <= now:
                self._next_try[shard] = float("inf")
                return shard
        return None

    def before(self, shard: int) -> list[int]:
        """Return the shards that are needed before this one, and this one."""
        return self.shards[: self.shards.index(shard) + 1] if shard in self.shards else self.shards

    def record(self, shard: int, refusal: NoClaim | None, now: float, *, failed: bool = False) -> None:
        """Record the result of a fetch; the shard is here if there is no refusal and it has not failed."""
        wait_s = _FAILED_AGAIN_S if failed else _AGAIN_S.get(refusal, float("inf"))
        self._next_try[shard] = now + wait_s
        if refusal is NoClaim.FULL:  # a later shard has no more right to the room than this one
            self._full_until = now + wait_s

    def wake_at(self) -> float:
        """Return when `next` may have a shard again; infinite if only a new window or a result can change that."""
        return max(self._full_until, min(self._next_try.values(), default=float("inf")))


class Prefetching:
    """Fetches shards on threads, which the first window starts and `close` ends."""

    def __init__(self, fetch: Fetch, has: Callable[[int], bool], num_threads: int) -> None:
        self._fetch, self._has = fetch, has
        self._changed = threading.Condition()
        self._window = Window()
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._logged: set[str] = set()

    def move(self, blocks: Sequence[Sequence[int]]) -> None:
        """Fetch these shards from now on, block by block. Returns at once."""
        with self._changed:
            self._window.move(blocks, os.getpid())
            self._changed.notify_all()
            if not self._threads and not self._is_closed:
                for number in range(self._num_threads):
                    self._threads.append(
                        threading.Thread(target=self._run, name=f"shoal-prefetch-{number}", daemon=True)
                    )
                    self._threads[-1].start()

    def close(self) -> None:
        """End the threads when their present range is read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the threads, after `close`."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._take_shard()) is not None:
            shard, keep = work
            refusal, failed = None, False
            try:
                if not self._has(shard):
                    refusal = self._fetch(shard, keep)
            except (DataError, OSError) as error:
                failed = True
                if self._is_first("shards.not_fetched"):
                    _log.warning("shards.not_fetched", extra={"error": str(error)})
            is_small = refusal is NoClaim.FULL and len(keep) <= self._window.num_present
            if is_small and self._is_first("shards.no_room"):
                message = "cache_bytes is less than the shards of one block; samples are read singly"
                _log.warning("shards.no_room", extra={"error": message})
            with self._changed:
                self._window.record(shard, refusal, time.monotonic(), failed=failed)
                self._changed.notify_all()

    def _is_first(self, event: str) -> bool:
        """Return True if the event has to be logged: each is logged once, while the data set is open."""
        with self._changed:
            is_new, self._logged = event not in self._logged, self._logged | {event}
        return is_new and not self._is_closed

    def _take_shard(self) -> tuple[int, list[int]] | None:
        """Wait for a shard to fetch; None if this is closed."""
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                if (shard := self._window.next(now)) is not None:
                    return shard, self._window.before(shard)
                wake_at = self._window.wake_at()
                self._changed.wait(None if wake_at == float("inf") else max(0.01, wake_at - now))
        return None
