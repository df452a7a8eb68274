"""ReportWriter: stores what supervisors have reported, all that has arrived in one transaction.

    requests  r1   r2 r3 r4     r5 r6             each waits until its reports are stored
    writes    |r1|          |r2 r3 r4 r5|    |r6|     one begins TICK_S after the one before, or when the reports come

A control plane of few jobs stores each report at once. A busy one writes larger transactions, not more of them, and one
thread does it. Used by the reception, on one asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service.clock import Clock
from shoal_service.home import ReportReceipt
from shoal_service.store import supervisor_links
from shoal_service.store.store import Store
from shoal_service.store.supervisor_links import Arrived

TICK_S = 0.05
_MOST = 32
"""Reports of one transaction: other writers wait for its end."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    arrived: Arrived
    stored: asyncio.Future[ReportReceipt]


class ReportWriter:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._began_mono = float("-inf")
        """When the last transaction began."""
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    async def store(self, arrived: Arrived) -> ReportReceipt:
        """Returns when they are stored. Raises AttemptTokenRefused, SupervisorReplaced, StoreUnavailable."""
        one = _Waiting(arrived, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return await one.stored

    async def _write_all(self) -> None:
        while self._waiting:
            early_s = self._began_mono + TICK_S - self._clock.monotonic()
            if early_s > 0:
                await self._clock.sleep(early_s)
            self._began_mono = self._clock.monotonic()
            batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            await self._write(batch)

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        """If one of them cannot be stored, each is stored alone, and only its request gets the error."""
        try:
            outcomes = await asyncio.to_thread(
                self._store.writing(supervisor_links.take_reports), [one.arrived for one in batch]
            )
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    await self._write([one])
            elif not batch[0].stored.done():
                batch[0].stored.set_exception(error)
            return
        for one, outcome in zip(batch, outcomes, strict=True):
            if one.stored.done():
                continue  # its request was cancelled
            if isinstance(outcome, ReportReceipt):
                one.stored.set_result(outcome)
            else:
                one.stored.set_exception(outcome)
