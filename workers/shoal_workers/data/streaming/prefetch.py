"""Fetches the shards of the present block and of the next ones ahead of training, on threads of this process.

    window     shards of the present block | of the next | of the one after it        moves on with the block
    threads    the first one of the window that is neither here, nor being fetched, nor failed a moment ago

All processes of a node do this in the same cache: what one of them fetches the others pass over, and take over if that
process is killed. A shard of the window is never deleted for a later one, so the window is filled as far as the cache
allows. What fails is logged and tried again later, and never ends training: the read that needs the shard says what is
wrong. Called by `StreamedShards`.
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
_AGAIN_S = {NoClaim.FETCHED_BY_OTHER: 0.25, NoClaim.FULL: 1.0}
_FAILED_AGAIN_S = 2.0
PATIENCE_S = 10.0
"""For how long one try of a fetch asks a store again that does not answer."""

Fetch = Callable[[int, Collection[int]], NoClaim | None]
"""A shard, and those that are not to be deleted for it."""


class Window:
    """Which shard is to be fetched next. Not for several threads."""

    def __init__(self) -> None:
        self.shards: list[int] = []
        self.num_present = 0
        """How many of them are those of the present block."""
        self._not_before: dict[int, float] = {}
        """Shards that are neither here nor to be asked for at once -> time of the next try."""
        self._done: set[int] = set()
        self._full_until = 0.0

    def move(self, blocks: Sequence[Sequence[int]], first: int) -> None:
        """`first`: where to begin in each block. Processes that begin elsewhere seldom want the same shard."""
        self.shards = [block[(first + at) % len(block)] for block in blocks for at in range(len(block))]
        self.num_present = len(blocks[0]) if blocks else 0
        kept = set(self.shards)
        self._done &= kept
        self._not_before = {shard: at for shard, at in self._not_before.items() if shard in kept}
        self._full_until = 0.0

    def next(self, now: float) -> int | None:
        """Takes a shard, which then counts as being fetched; None if there is nothing to do before `wake_at`."""
        if now < self._full_until:
            return None
        for shard in self.shards:
            if shard not in self._done and self._not_before.get(shard, 0.0) <= now:
                self._not_before[shard] = float("inf")
                return shard
        return None

    def before(self, shard: int) -> list[int]:
        """The shards that are needed first, and itself."""
        return self.shards[: self.shards.index(shard) + 1] if shard in self.shards else self.shards

    def answered(self, shard: int, why: NoClaim | None, now: float, *, failed: bool = False) -> None:
        """What became of a shard: `why` None: it is here."""
        self._not_before.pop(shard, None)
        if failed:
            self._not_before[shard] = now + _FAILED_AGAIN_S
        elif why in _AGAIN_S:
            self._not_before[shard] = now + _AGAIN_S[why]
            if why is NoClaim.FULL:  # a later shard has no more right to the room than this one
                self._full_until = now + _AGAIN_S[why]
        else:
            self._done.add(shard)

    def wake_at(self) -> float:
        """When `next` may give something again; infinite: not before the window moves, or an answer comes."""
        times = [at for shard, at in self._not_before.items() if shard not in self._done]
        return max(self._full_until, min(times, default=float("inf")))


class Prefetching:
    """Threads, started with the first window. `close` ends them."""

    def __init__(self, fetch: Fetch, has: Callable[[int], bool], num_threads: int) -> None:
        self._fetch, self._has = fetch, has
        self._changed = threading.Condition()
        self._window = Window()
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._logged: set[str] = set()

    def move(self, blocks: Sequence[Sequence[int]]) -> None:
        """The shards that are needed from now on, block by block. Returns at once."""
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
        """The threads end when their present range is read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Waits for the threads, after `close`."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._taken()) is not None:
            shard, keep = work
            why, failed = None, False
            try:
                if not self._has(shard):
                    why = self._fetch(shard, keep)
            except (DataError, OSError) as error:
                failed = True
                if self._is_first("shards.not_fetched"):
                    _log.warning("shards.not_fetched", extra={"error": str(error)})
            is_small = why is NoClaim.FULL and len(keep) <= self._window.num_present
            if is_small and self._is_first("shards.no_room"):
                message = "cache_bytes is less than the shards of one block; samples are read singly"
                _log.warning("shards.no_room", extra={"error": message})
            with self._changed:
                self._window.answered(shard, why, time.monotonic(), failed=failed)
                self._changed.notify_all()

    def _is_first(self, event: str) -> bool:
        """Return whether the event is to be logged: each is logged once, while the data set is open."""
        with self._changed:
            is_new, self._logged = event not in self._logged, self._logged | {event}
        return is_new and not self._is_closed

    def _taken(self) -> tuple[int, list[int]] | None:
        """Waits for a shard to fetch; None if it is closed."""
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                if (shard := self._window.next(now)) is not None:
                    return shard, self._window.before(shard)
                wake_at = self._window.wake_at()
                self._changed.wait(None if wake_at == float("inf") else max(0.01, wake_at - now))
        return None
