"""Serve the requests of supervisors, without HTTP: store their reports, and wait for their directives.

    report     -> SupervisorEndpoint -> ReportWriter -> supervisor_links.take_reports -> receipt
    directive  -> SupervisorEndpoint: the newest one in the store, or a wait for the next
    drivers    -> SupervisorLinks: when supervisors have reported last, read once for all drivers

Every control plane has an endpoint, with the lease or without. So reports may arrive at another control plane than the
one that drives the attempt, and drivers read them from the store. A directive that another process has written is
found within a second, with one query for all requests that wait. The REST routes use the endpoint on their event loop.
It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from shoal_service.clock import Clock
from shoal_service.home import MAX_WAIT_S, AttemptCaller, DirectiveAnswer, HomeReport, ReportReceipt
from shoal_service.store import Store, StoreUnavailable, Topic, supervisor_links
from shoal_service.store.supervisor_links import AttemptKey, ReceivedReport, SupervisorLink

_REREAD_S = 1.0
"""Pause between two reads of the directives that other processes may have written."""
TICK_S = 0.05
"""Shortest time between the starts of two transactions with reports."""
_MAX_REPORTS = 32
"""Most reports of one transaction: other writers wait for its end."""
_MAX_AGE_S = 0.25
"""Age up to which the links that were read last are used again."""


class SupervisorEndpoint:
    """Answers the requests of supervisors. Close it after use."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._writer = ReportWriter(store, clock)
        self._waiting: dict[str, set[asyncio.Event]] = {}
        """Events of the requests that wait for a directive, by job id. They are set when it may have changed."""
        self._polling: asyncio.Task[None] | None = None
        self._is_closed = False

    async def store_report(self, caller: AttemptCaller, report: HomeReport) -> ReportReceipt:
        """Return when the report is stored. Raises AttemptTokenRefused, SupervisorReplaced, StoreUnavailable."""
        return await self._writer.store(ReceivedReport(caller, report, self._clock.time()))

    async def wait_for_directive(self, caller: AttemptCaller, after: int, wait_s: float) -> DirectiveAnswer:
        """Return the newest directive once its number differs from `after`; without a directive after `wait_s` seconds.

        A lower number counts too: a restored database restarts the numbers. Raises AttemptTokenRefused,
        StoreUnavailable.
        """
        until_mono = self._clock.monotonic() + min(wait_s, MAX_WAIT_S)
        with self._watch(caller.job_id) as changed:
            while True:
                changed.clear()
                newest = await asyncio.to_thread(
                    self._store.reading(supervisor_links.read_directive), caller.job_id, caller.attempt
                )
                if newest is not None and newest.number != after:
                    return newest
                left_s = until_mono - self._clock.monotonic()
                if left_s <= 0 or self._is_closed:
                    return DirectiveAnswer(number=after)
                with suppress(TimeoutError):
                    await self._clock.wait_for(changed.wait(), left_s)

    def close(self) -> None:
        """End every wait; later ones return immediately. Call it on the event loop of the waits."""
        self._is_closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()
        if self._polling is not None:
            self._polling.cancel()

    @contextmanager
    def _watch(self, job_id: str) -> Iterator[asyncio.Event]:
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        self._waiting.setdefault(job_id, set()).add(event)
        if self._polling is None or self._polling.done():
            self._polling = loop.create_task(self._poll_directives())
        try:
            topic = Topic.DIRECTIVES.narrow_to(job_id)
            with self._store.subscribe(lambda _: loop.call_soon_threadsafe(event.set), topic):
                yield event
        finally:
            events = self._waiting[job_id]
            events.remove(event)
            if not events:
                del self._waiting[job_id]

    async def _poll_directives(self) -> None:
        """While any request waits, find the directives that other processes write."""
        previous: Counter[str] = Counter()
        while self._waiting and not self._is_closed:
            await self._clock.sleep(_REREAD_S)
            waiting = frozenset(self._waiting)
            try:
                numbers = await asyncio.to_thread(self._store.reading(supervisor_links.read_directive_numbers), waiting)
            except StoreUnavailable:
                continue
            for job_id, number in numbers.items():
                if number != previous[job_id]:
                    for event in self._waiting.get(job_id, ()):
                        event.set()
            previous = Counter(numbers)


@dataclass(frozen=True, slots=True, eq=False)
class _PendingReport:
    received: ReceivedReport
    receipt: asyncio.Future[ReportReceipt]


class ReportWriter:
    """Stores the reports of many supervisors in few transactions, on one thread.

        requests  r1   r2 r3 r4     r5 r6             each waits until its report is stored
        writes    |r1|          |r2 r3 r4 r5|    |r6|     one begins TICK_S after the one before, or when reports come

    A control plane of few jobs stores each report at once. A busy one writes larger transactions, not more of them.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._began_mono = float("-inf")
        """When the last transaction began."""
        self._pending: list[_PendingReport] = []
        self._writing: asyncio.Task[None] | None = None

    async def store(self, received: ReceivedReport) -> ReportReceipt:
        """Return when the report is stored. Raises AttemptTokenRefused, SupervisorReplaced, StoreUnavailable."""
        pending = _PendingReport(received, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return await pending.receipt

    async def _write_all(self) -> None:
        while self._pending:
            early_s = self._began_mono + TICK_S - self._clock.monotonic()
            if early_s > 0:
                await self._clock.sleep(early_s)
            self._began_mono = self._clock.monotonic()
            batch, self._pending = self._pending[:_MAX_REPORTS], self._pending[_MAX_REPORTS:]
            await self._write(batch)

    async def _write(self, batch: Sequence[_PendingReport]) -> None:
        """Store these reports in one transaction; if that fails, each alone, so that only the failing request gets the
        error."""
        try:
            outcomes = await asyncio.to_thread(
                self._store.writing(supervisor_links.take_reports), [pending.received for pending in batch]
            )
        except Exception as error:
            if len(batch) > 1:
                for pending in batch:
                    await self._write([pending])
            elif not batch[0].receipt.done():
                batch[0].receipt.set_exception(error)
            return
        for pending, outcome in zip(batch, outcomes, strict=True):
            if pending.receipt.done():
                continue  # its request was cancelled
            if isinstance(outcome, ReportReceipt):
                pending.receipt.set_result(outcome)
            else:
                pending.receipt.set_exception(outcome)


class SupervisorLinks:
    """Last reports of all supervisors, which the drivers of a control loop read together, on its event loop."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._links: Mapping[AttemptKey, SupervisorLink] = {}
        self._read_mono = float("-inf")
        self._turn = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        """The reading that has not begun."""

    async def find_link(self, key: AttemptKey, *, newest: bool = False) -> SupervisorLink | None:
        """Return the link of an attempt's supervisor; None if the attempt is over. Raises StoreUnavailable.

        All calls that wait share one reading: after a takeover every driver calls at once.

        Args:
            newest: include what was committed before this call; else the link may be a quarter of a second old.
        """
        if newest or self._clock.monotonic() - self._read_mono >= _MAX_AGE_S:
            reading = None if newest else self._reading
            if reading is None:
                reading = self._next = self._next or asyncio.create_task(self._read())
            await asyncio.shield(reading)
        return self._links.get(key)

    async def _read(self) -> None:
        async with self._turn:
            self._reading, self._next = self._next, None
            began_mono = self._clock.monotonic()
            try:
                self._links = await asyncio.to_thread(self._store.reading(supervisor_links.read_links))
                self._read_mono = began_mono
            finally:
                self._reading = None
