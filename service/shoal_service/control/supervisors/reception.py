"""Reception: the service's side of what supervisors say and ask when they dial home, without HTTP.

    report     -> ReportWriter -> supervisor_links.take_reports -> receipt
    directive  -> the newest one in the store, or a wait for the next

Used by the routes of the REST edge, on their loop; any control plane has one, with the lease or without. It decides
nothing. A directive that another process has written is found within a second, with one query for all who wait.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shoal_service.clock import Clock
from shoal_service.control.supervisors.report_writer import ReportWriter
from shoal_service.home import MAX_WAIT_S, AttemptCaller, DirectiveAnswer, HomeReport, ReportReceipt
from shoal_service.store import supervisor_links
from shoal_service.store.errors import StoreUnavailable
from shoal_service.store.store import Store
from shoal_service.store.supervisor_links import Arrived, directives_of

_REREAD_S = 1.0


class Reception:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._writer = ReportWriter(store, clock)
        self._waiting: dict[str, set[asyncio.Event]] = {}
        """By job: set when its directive may have changed."""
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False

    async def report(self, caller: AttemptCaller, report: HomeReport) -> ReportReceipt:
        """Returns when the items are stored. Raises AttemptTokenRefused, SupervisorReplaced, StoreUnavailable."""
        return await self._writer.store(Arrived(caller, report, self._clock.time()))

    async def directive(self, caller: AttemptCaller, after: int, wait_s: float) -> DirectiveAnswer:
        """The newest directive if its number is not `after`, which also holds after a database was restored; else
        waits for the next one, for `wait_s` seconds at most. Raises AttemptTokenRefused, StoreUnavailable."""
        until_mono = self._clock.monotonic() + min(wait_s, MAX_WAIT_S)
        with self._watch(caller.job_id) as changed:
            while True:
                changed.clear()
                found = await asyncio.to_thread(
                    self._store.reading(supervisor_links.directive), caller.job_id, caller.attempt
                )
                if found is not None and found.number != after:
                    return DirectiveAnswer(number=found.number, directive=json.loads(found.body))
                left_s = until_mono - self._clock.monotonic()
                if left_s <= 0 or self._is_closed:
                    return DirectiveAnswer(number=after)
                with suppress(TimeoutError):
                    await self._clock.wait_for(changed.wait(), left_s)

    def close(self) -> None:
        """Ends every wait; later ones return immediately. On the loop of the waits."""
        self._is_closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()
        if self._looking is not None:
            self._looking.cancel()

    @contextmanager
    def _watch(self, job_id: str) -> Iterator[asyncio.Event]:
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        self._waiting.setdefault(job_id, set()).add(event)
        if self._looking is None or self._looking.done():
            self._looking = loop.create_task(self._look())
        try:
            with self._store.subscribe(lambda _: loop.call_soon_threadsafe(event.set), directives_of(job_id)):
                yield event
        finally:
            events = self._waiting[job_id]
            events.remove(event)
            if not events:
                del self._waiting[job_id]

    async def _look(self) -> None:
        """For directives that other processes write, while someone waits."""
        known: Counter[str] = Counter()
        while self._waiting and not self._is_closed:
            await self._clock.sleep(_REREAD_S)
            waiting = frozenset(self._waiting)
            try:
                found = await asyncio.to_thread(self._store.reading(supervisor_links.directive_numbers), waiting)
            except StoreUnavailable:
                continue
            for job_id, number in found.items():
                if number != known[job_id]:
                    for event in self._waiting.get(job_id, ()):
                        event.set()
            known = Counter(found)
