"""Clock: the time that the service's loops read, and their only way to wait for time to pass.

Passed by the composition roots to the control loop and to the supervisor, so that a test decides what time it is.
Never read inside a decision: the core is given `now`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

T = TypeVar("T")
_SMALLEST_JUMP_S = 1.0


class Clock(Protocol):
    """`tests/doubles/fake_clock.py` has the other implementation; both pass the same contract tests."""

    def time(self) -> float:
        """Wall-clock time, seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    async def sleep(self, seconds: float) -> None: ...

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float) -> T:
        """Waits for the result of the awaitable. Raises TimeoutError after `timeout_s` seconds; the awaitable is
        cancelled then."""


async def wait_for_any(clock: Clock, *events: asyncio.Event, timeout_s: float) -> None:
    """Wait until one of the events is set, or the time is over."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await clock.wait_for(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED), timeout_s)
    except TimeoutError:
        pass
    finally:
        for wait in waits:
            wait.cancel()


class WallClockWatch:
    """Notices that the wall clock was set, or that the machine was suspended: monotonic time does not move then."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_s = self._read()

    def jump_s(self) -> float:
        """Seconds that the wall clock has jumped since the last call; 0: it has not, or this thread was held up while
        it looked."""
        ahead_s = self._read()
        if ahead_s is None:
            return 0.0
        if self._ahead_s is None:
            self._ahead_s = ahead_s
        jump_s = ahead_s - self._ahead_s
        if abs(jump_s) < _SMALLEST_JUMP_S:
            return 0.0  # it is being slewed; the small steps add up
        self._ahead_s = ahead_s
        return jump_s

    def _read(self) -> float | None:
        """Wall-clock minus monotonic time; None if the two were not read at the same time."""
        before = self._clock.monotonic()
        wall = self._clock.time()
        after = self._clock.monotonic()
        return wall - after if after - before < _SMALLEST_JUMP_S / 2 else None


class SystemClock:
    """The clock of this machine."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float) -> T:
        return await asyncio.wait_for(awaitable, timeout_s)
