"""FakeClock: time passes only when a test advances it."""

import asyncio
import heapq
from collections.abc import Awaitable
from itertools import count
from typing import TypeVar

from doubles.event_loop import settle

T = TypeVar("T")


class FakeClock:
    """A `shoal_service.clock.Clock`. Wall-clock and monotonic time are the same until the wall clock jumps."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._ahead_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def time(self) -> float:
        return self._now + self._ahead_s

    def jump(self, seconds: float) -> None:
        """The wall clock is set, or the machine was suspended; no time passes for its processes."""
        self._ahead_s += seconds

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        waking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(0.0, seconds), next(self._order), waking))
        if seconds <= 0:
            waking.set_result(None)
        await waking

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float) -> T:
        task = asyncio.ensure_future(awaitable)
        timer = asyncio.ensure_future(self.sleep(timeout_s))
        try:
            await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            timer.cancel()
            if not task.done():
                task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise TimeoutError

    def take(self, seconds: float) -> None:
        """What runs now takes this long; nobody wakes meanwhile. Also from another thread than the loop's."""
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        """Let time pass. Each sleeper wakes at its own time, and what follows from it happens before the next one."""
        end = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end + 1e-9:
            at, _, waking = heapq.heappop(self._sleepers)
            if waking.done():
                continue
            self._now = max(self._now, at)
            waking.set_result(None)
            await settle()
        self._now = end
