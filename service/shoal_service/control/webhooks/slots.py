"""Slots: how many attempts go on at a time, so that a receiver that is slow or away delays no other one.

    one receiver (scheme, host, port)     at most `per_receiver` attempts
    lanes that have not failed            share `healthy` slots
    lanes that have failed                share `failing` slots of their own

A receiver that hangs takes slots of the healthy lanes only until its first time-out. On the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """Attempts at a time."""

    per_receiver: int = 4
    healthy: int = 128
    failing: int = 32


class Slots:
    """Waiting attempts get their slots in the order in which they have asked."""

    def __init__(self, limits: SlotLimits) -> None:
        self._limits = limits
        self._healthy = asyncio.Semaphore(limits.healthy)
        self._failing = asyncio.Semaphore(limits.failing)
        self._receivers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Those with attempts now."""

    @asynccontextmanager
    async def one(self, receiver: str, *, has_failed: bool) -> AsyncIterator[None]:
        """Waits for a slot of the receiver first, so that attempts that wait for it take no other slot."""
        of_receiver = self._receivers.get(receiver)
        if of_receiver is None:
            of_receiver = self._receivers[receiver] = asyncio.Semaphore(self._limits.per_receiver)
        async with of_receiver, self._failing if has_failed else self._healthy:
            yield
