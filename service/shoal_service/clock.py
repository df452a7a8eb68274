"""The clock that the service's loops read, and by which they wait.

The composition roots pass it to the control loop and to the supervisor, so that a test decides what time it is. No
decision reads it: the core is given `now`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_SMALLEST_JUMP_S = 1.0


class Clock(Protocol):
    """Tells the time and waits. `SystemClock` and `tests/doubles/fake_clock.py` pass the same contract tests."""

    def time(self) -> float:
        """Return the wall-clock time, in seconds since the epoch."""

    def monotonic(self) -> float:
        """Return the seconds since an arbitrary moment. They never decrease."""

    async def sleep(self, seconds: float) -> None: ...

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float) -> T:
        """Wait for the result of the awaitable. After `timeout_s` it is cancelled, and TimeoutError is raised."""


async def wait_for_any(clock: Clock, *events: asyncio.Event, timeout_s: float) -> None:
    """Wait until one of the events is set, `timeout_s` seconds at most."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await clock.wait_for(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED), timeout_s)
    except TimeoutError:
        pass
    finally:
        for wait in waits:
            wait.cancel()


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class SilenceTimer:
    """Measures for how long a value has not changed, in the time in which this process was awake."""

    def __init__(self, clock: Clock, longest_s: float) -> None:
        """`longest_s`: of the time between two observations that counts: the process may have been suspended."""
        self._clock = clock
        self._longest_s = longest_s
        self._observed_mono = clock.monotonic()
        self._value: float | None = None
        self.silent_s = 0.0

    def observe(self, value: float) -> bool:
        """Return True if the value has changed since the observation before; the first one shows nothing."""
        now_mono = self._clock.monotonic()
        self.silent_s += min(now_mono - self._observed_mono, self._longest_s)
        self._observed_mono = now_mono
        before, self._value = self._value, value
        if before is None or value == before:
            return False
        self.silent_s = 0.0
        return True


class WallClockWatch:
    """Detects jumps of the wall clock against monotonic time: it was set, or the machine was suspended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_s = self._read_offset_s()

    def measure_jump_s(self) -> float:
        """Return the seconds that the wall clock has jumped since the last call.

        0 if it has not, or if this thread was interrupted between the readings.
        """
        offset_s = self._read_offset_s()
        if offset_s is None:
            return 0.0
        if self._offset_s is None:
            self._offset_s = offset_s
        jump_s = offset_s - self._offset_s
        if abs(jump_s) < _SMALLEST_JUMP_S:
            return 0.0  # the clock is slewed in small steps, which add up until they count
        self._offset_s = offset_s
        return jump_s

    def _read_offset_s(self) -> float | None:
        """Return wall-clock minus monotonic time; None if the two were not read at the same time."""
        before = self._clock.monotonic()
        wall = self._clock.time()
        after = self._clock.monotonic()
        return wall - after if after - before < _SMALLEST_JUMP_S / 2 else None


class SystemClock:
    """Reads the clock of this machine."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float) -> T:
        return await asyncio.wait_for(awaitable, timeout_s)
