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


class Clock(Protocol):
    """`tests/doubles/fake_clock.py` has the other implementation; both pass the same contract tests."""

    def time(self) -> float:
        """Wall-clock time, seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    async def sleep(self, seconds: float) -> None: ...

    async def wait_for(self, awaitable: Awaitable[T], timeout_s: float) -> T:
        """The awaitable's result. TimeoutError after `timeout_s` seconds; the awaitable is cancelled then."""


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
