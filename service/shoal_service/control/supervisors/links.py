"""SupervisorLinks: when supervisors have reported last, read once for all drivers.

Reports may arrive at another control plane than the one that drives the attempt, so the drivers look at the store.
Shared by the drivers of a control loop, on its asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shoal_service.clock import Clock
from shoal_service.store import supervisor_links
from shoal_service.store.store import Store
from shoal_service.store.supervisor_links import AttemptKey, SupervisorLink

_FRESH_S = 0.25


class SupervisorLinks:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._links: Mapping[AttemptKey, SupervisorLink] = {}
        self._read_mono = float("-inf")
        self._reading = asyncio.Lock()

    async def of(self, key: AttemptKey, *, newest: bool = False) -> SupervisorLink | None:
        """None: the attempt is over. `newest`: what was committed before this call; else it may be a quarter of a
        second old. Raises StoreUnavailable."""
        async with self._reading:
            if newest or self._clock.monotonic() - self._read_mono >= _FRESH_S:
                began_mono = self._clock.monotonic()
                self._links = await asyncio.to_thread(self._store.reading(supervisor_links.links))
                self._read_mono = began_mono
            return self._links.get(key)
