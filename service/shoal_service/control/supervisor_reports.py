"""What supervisors report and ask when they dial home, without HTTP. It decides nothing.

    report     -> Reception -> ReportWriter -> supervisor_links.take_reports -> receipt
    directive  -> Reception: the newest one in the store, or a wait for the next
    drivers    -> SupervisorLinks: when supervisors have reported last, read once for all drivers

The routes of the REST edge use the reception, on their loop; any control plane has one, with the lease or without, so
reports may arrive at another control plane than the one that drives the attempt, and the drivers look at the store. A
directive that another process has written is found within a second, with one query for all who wait.
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
from shoal_service.store.supervisor_links import Arrived, AttemptKey, SupervisorLink

_REREAD_S = 1.0
TICK_S = 0.05
_MOST = 32
"""Most reports of one transaction: other writers wait for its end."""
_FRESH_S = 0.25


class Reception:
    """Answers supervisors. Close it after use."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._writer = ReportWriter(store, clock)
        self._waiting: dict[str, set[asyncio.Event]] = {}
        """Events of the requests that wait for a directive, by job id. They are set when it may have changed."""
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
                newest = await asyncio.to_thread(
                    self._store.reading(supervisor_links.directive), caller.job_id, caller.attempt
                )
                if newest is not None and newest.number != after:
                    return newest
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
            topic = Topic.DIRECTIVES.narrow_to(job_id)
            with self._store.subscribe(lambda _: loop.call_soon_threadsafe(event.set), topic):
                yield event
        finally:
            events = self._waiting[job_id]
            events.remove(event)
            if not events:
                del self._waiting[job_id]

    async def _look(self) -> None:
        """Looks for directives that other processes write, while someone waits."""
        known: Counter[str] = Counter()
        while self._waiting and not self._is_closed:
            await self._clock.sleep(_REREAD_S)
            waiting = frozenset(self._waiting)
            try:
                numbers = await asyncio.to_thread(self._store.reading(supervisor_links.directive_numbers), waiting)
            except StoreUnavailable:
                continue
            for job_id, number in numbers.items():
                if number != known[job_id]:
                    for event in self._waiting.get(job_id, ()):
                        event.set()
            known = Counter(numbers)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    arrived: Arrived
    stored: asyncio.Future[ReportReceipt]


class ReportWriter:
    """Stores what supervisors have reported, all that has arrived in one transaction.

        requests  r1   r2 r3 r4     r5 r6             each waits until its reports are stored
        writes    |r1|          |r2 r3 r4 r5|    |r6|     one begins TICK_S after the one before, or when reports come

    A control plane of few jobs stores each report at once. A busy one writes larger transactions, not more of them, and
    one thread does it.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._began_mono = float("-inf")
        """When the last transaction began."""
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None

    async def store(self, arrived: Arrived) -> ReportReceipt:
        """Returns when they are stored. Raises AttemptTokenRefused, SupervisorReplaced, StoreUnavailable."""
        waiting = _Waiting(arrived, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return await waiting.stored

    async def _write_all(self) -> None:
        while self._waiting:
            early_s = self._began_mono + TICK_S - self._clock.monotonic()
            if early_s > 0:
                await self._clock.sleep(early_s)
            self._began_mono = self._clock.monotonic()
            batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
            await self._write(batch)

    async def _write(self, batch: Sequence[_Waiting]) -> None:
        """Store these reports in one transaction. If one of them cannot be stored, each is stored alone, and only its
        request gets the error."""
        try:
            outcomes = await asyncio.to_thread(
                self._store.writing(supervisor_links.take_reports), [waiting.arrived for waiting in batch]
            )
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    await self._write([waiting])
            elif not batch[0].stored.done():
                batch[0].stored.set_exception(error)
            return
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if waiting.stored.done():
                continue  # its request was cancelled
            if isinstance(outcome, ReportReceipt):
                waiting.stored.set_result(outcome)
            else:
                waiting.stored.set_exception(outcome)


class SupervisorLinks:
    """When supervisors have reported last. Shared by the drivers of a control loop, on its asyncio loop."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._links: Mapping[AttemptKey, SupervisorLink] = {}
        self._read_mono = float("-inf")
        self._turn = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        """The reading that has not begun."""

    async def of(self, key: AttemptKey, *, newest: bool = False) -> SupervisorLink | None:
        """When the supervisor of an attempt has reported last; None: the attempt is over. `newest`: the answer includes
        what was committed before this call; otherwise it may be a quarter of a second old. Raises StoreUnavailable.

        All who wait share a reading, however long the others take to go on: after a takeover every driver asks.
        """
        if newest or self._clock.monotonic() - self._read_mono >= _FRESH_S:
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
                self._links = await asyncio.to_thread(self._store.reading(supervisor_links.links))
                self._read_mono = began_mono
            finally:
                self._reading = None
