"""ReportWriter: stores what supervisors have reported, all that has arrived in one transaction.

    drivers   r1   r2 r3 r4     r5 r6             each waits until its reports are stored
    writes    |r1|          |r2 r3 r4 r5|    |r6|     one begins TICK_S after the one before, or when the reports come

A control plane of few jobs stores each report at once. A busy one writes larger transactions, not more of them, and one
thread does it. Shared by the drivers of a control loop, on its asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service.clock import Clock
from shoal_service.reports import SupervisorReports
from shoal_service.store.reports import Received
from shoal_service.store.store import Store

TICK_S = 0.05
_MOST = 32
"""Reports of one transaction: other writers wait for its end."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    received: Received
    epoch: int
    stored: asyncio.Future[None]


class ReportWriter:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._began_mono = float("-inf")
        """When the last transaction began."""
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    async def store(self, job_id: str, reports: SupervisorReports, *, epoch: int, now: float) -> None:
        """Returns when they are stored. Raises what `Store.apply` raises."""
        one = _Waiting(Received(job_id, reports, now), epoch, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        await one.stored

    async def _write_all(self) -> None:
        while self._waiting:
            early_s = self._began_mono + TICK_S - self._clock.monotonic()
            if early_s > 0:
                await self._clock.sleep(early_s)
            self._began_mono = self._clock.monotonic()
            epoch = self._waiting[0].epoch
            batch = [one for one in self._waiting if one.epoch == epoch][:_MOST]
            self._waiting = [one for one in self._waiting if one not in batch]
            await self._write(batch)

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        """If one of them cannot be stored, each is stored alone, and only its driver gets the error."""
        try:
            await asyncio.to_thread(self._store.apply_all, [one.received for one in batch], epoch=batch[0].epoch)
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    await self._write([one])
            elif not batch[0].stored.done():
                batch[0].stored.set_exception(error)
            return
        for one in batch:
            if not one.stored.done():  # else its driver was cancelled
                one.stored.set_result(None)
