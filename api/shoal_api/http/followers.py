"""The sources of streams: the events of a job, its log, the job itself, the list of jobs, the overviews. Each is a
`streams.Follower`; the routes make one for each stream.

The stream of a job's overview first sends everything, then what has changed, as one server-sent event per part:

    job, series, samples, incidents, workers, events, checkpoints, logs       and `end`

`series`, `events` and `logs` continue what was sent before, and `samples` too: those of the first answer have `replace`
set. The other parts are complete each time. The id of an event says how far the client is, so that a client that comes
back gets only what it lacks. All clients of a job that are equally far get the same bytes, which are made once, so the
cost of a change does not grow with the number of open pages.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool

from shoal_api.answers import EventPage, StreamEnd, find_log_source
from shoal_api.http.streams import Batch, sse_event
from shoal_service.store import Store, checkpoint_rows, curves, histories
from shoal_service.views import LogView
from shoal_workers.contract import JobState

_BATCH = 500
POSITION = r"^([0-9]{1,18}\.[0-9]{1,18}\.[0-9]{1,18})?$"
"""An id of the stream of an overview: the numbers of the last event, step and line of the log."""
_NEW_AT_ONCE = 1000
_MAX_LOG_LINES = 500
"""Log lines in the first answer, at most."""
_Version = tuple[float, int, int]
_LINES = TypeAdapter(list[Any])


@dataclass(frozen=True, slots=True)
class LogSelection:
    """Which lines of a job's log."""

    rank: int | None = None
    """None means all ranks, and lines of workers without a rank."""
    after: int = 0
    tail: int | None = None
    """Number of last lines to begin with; 0: only lines that are yet to come."""


def read_lines(store: Store, job_id: str, lines: LogSelection, limit: int) -> tuple[list[LogView], int]:
    """Read the last `tail` lines, or else the first `limit` lines, and the number after which the next ones are.

    Raises:
        JobNotFound
    """
    # the newest line tells where the next ones begin, even if none is requested
    tail = None if lines.tail is None else max(1, lines.tail)
    log_lines = store.reading(histories.read_logs)(
        job_id, rank=lines.rank, after=lines.after, tail=tail, limit=limit if tail is None else tail
    )
    next_after = log_lines[-1].seq if log_lines else lines.after
    return ([] if lines.tail == 0 else log_lines), next_after


def read_events(store: Store, job_id: str, after: int, limit: int) -> EventPage:
    """Read once. The state is read before the events, so that the event of the job's end is among them."""
    ended = store.get_job(job_id).status.state.ended
    events = tuple(store.reading(histories.read_events)(job_id, after=after, limit=limit))
    next_after = events[-1].seq if events else after
    return EventPage(items=events, next_after=next_after, ended=ended and len(events) < limit)


def follow_events(store: Store, job_id: str, after: int) -> Iterator[Batch]:
    """Send every event after a number, without gaps; the number is the SSE id."""
    while True:
        page = read_events(store, job_id, after, _BATCH)
        after = page.next_after
        chunks = [sse_event(event.model_dump_json(), event_id=event.seq) for event in page.items]
        if page.ended:
            chunks.append(_end_event(store.get_job(job_id).status.state))
        yield Batch(tuple(chunks), more=len(page.items) == _BATCH, ended=page.ended)


def follow_log(store: Store, job_id: str, lines: LogSelection, *, plain: bool) -> Iterator[Batch]:
    """Send every line of the log after a number, as server-sent events or as plain text."""
    while True:
        state = store.get_job(job_id).status.state
        logs, after = read_lines(store, job_id, lines, _BATCH)
        more = lines.tail is None and len(logs) == _BATCH
        lines = replace(lines, after=after, tail=None)  # the next lines are new ones
        ended = state.ended and not more
        if plain:
            chunks = [plain_line(line).encode() for line in logs]
        else:
            chunks = [sse_event(line.model_dump_json(), event_id=line.seq) for line in logs]
            chunks += [_end_event(state)] if ended else []
        yield Batch(tuple(chunks), more=more, ended=ended)


def follow_document(event: str, read_document: Callable[[], str]) -> Iterator[Batch]:
    """Send a document after each change of it, as events of one name."""
    sent = ""
    while True:
        document = read_document()
        yield Batch((sse_event(document, event=event),) if document != sent else ())
        sent = document


def follow_job(store: Store, job_id: str) -> Iterator[Batch]:
    """Send the job after each change, as events `job`, until its end."""
    sent = ""
    while True:
        job = store.get_job(job_id)
        state, document = job.status.state, job.model_dump_json()
        chunks = [sse_event(document, event="job")] if document != sent else []
        chunks += [_end_event(state)] if state.ended else []
        yield Batch(tuple(chunks), ended=state.ended)
        sent = document


def plain_line(line: LogView) -> str:
    """Return one line of a log for people. The text comes from users' code, so control characters are replaced."""
    text = "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line.text.rstrip("\r\n"))
    return f"[{find_log_source(line)}] {text}\n"


def _end_event(state: JobState) -> bytes:
    """Return the last event of a stream about a job that has ended."""
    return sse_event(StreamEnd(state=state).model_dump_json(), event="end")


@dataclass(frozen=True, slots=True)
class Position:
    """How far a client is."""

    event: int = 0
    step: int = -1
    log: int = 0
    sampled_at: float = 0.0
    documents: tuple[int, int, int] = (0, 0, 0)
    """Checksums of the incidents, workers and checkpoints that the client has."""
    version: _Version | None = None
    """None if the client has just connected."""

    @classmethod
    def parse(cls, event_id: str) -> Position:
        event, step, log = map(int, event_id.split("."))
        return cls(event=event, step=step, log=log)

    @property
    def id(self) -> str:
        return f"{self.event}.{max(0, self.step)}.{self.log}"


_Question = tuple[str, Position, bool]
"""Job, how far the client is, and whether it wants the log."""
_Part = tuple[JobState, tuple[bytes, ...], Position]
"""State of the job, what a client lacks, and how far it is then."""


class OverviewReader:
    """Reads overviews, one at a time, for all streams of an application. On its event loop.

    Streams that are equally far share a read that has begun after all of them asked. While one read runs, all who ask
    share the next, so 200 open pages of a job cost one read a change, and no thread waits for another.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._asked: dict[_Question, asyncio.Task[_Part]] = {}
        """Reads that have not begun."""

    async def read(self, question: _Question) -> _Part:
        """Return the state of the job, the parts after the position, and the position after them."""
        if question not in self._asked:
            self._asked[question] = asyncio.create_task(self._read(question))
        return await asyncio.shield(self._asked[question])  # the others wait for it even if this client has gone

    async def _read(self, question: _Question) -> _Part:
        async with self._turn:
            del self._asked[question]
            return await run_in_threadpool(_read_after, self._store, *question)


async def follow_overview(
    reader: OverviewReader, job_id: str, position: Position, *, logs: bool
) -> AsyncIterator[Batch]:
    """Send the overview of one job to one client."""
    while True:
        before = position
        state, chunks, position = await reader.read((job_id, before, logs))
        more = position.event - before.event >= _NEW_AT_ONCE or (logs and position.log - before.log >= _NEW_AT_ONCE)
        ended = state.ended and not more
        yield Batch((*chunks, _end_event(state)) if ended else chunks, more=more, ended=ended)
        if more:
            position = replace(position, version=None)


def _read_after(store: Store, job_id: str, position: Position, logs: bool) -> _Part:
    """Read what a client lacks; nothing if the job has not changed since."""
    state, version = store.reading(histories.read_job_version)(job_id)
    if version == position.version:
        return state, (), position
    return state, *_parts(store, job_id, position, version, logs=logs)


def _parts(
    store: Store, job_id: str, position: Position, version: _Version, *, logs: bool
) -> tuple[tuple[bytes, ...], Position]:
    job = store.get_job(job_id)
    first = position.version is None
    parts: list[tuple[str, str]] = [("job", job.model_dump_json())]

    # after a rollback steps are computed again: the client gets them a second time, with their new values
    rolled_back = 0 < job.status.step < position.step
    after = job.status.step if rolled_back else position.step
    series = store.reading(histories.read_series_columns)(job_id, after_step=after)
    if series.step or first:
        parts.append(("series", _columns(series, is_first=position.step < 0)))
    samples = store.reading(curves.read_samples)(job_id, after=position.sampled_at)
    if samples.at or first:
        parts.append(("samples", _columns(samples, is_first=position.sampled_at == 0.0)))

    documents = {
        "incidents": to_json(store.reading(histories.read_incidents)(job_id, newest=histories.MAX_INCIDENTS)).decode(),
        "workers": to_json(store.reading(histories.read_workers)(job_id)).decode(),
        "checkpoints": to_json(
            store.reading(checkpoint_rows.read_checkpoints)(job_id, newest=histories.MAX_CHECKPOINTS)
        ).decode(),
    }
    checksums = tuple(zlib.crc32(text.encode()) for text in documents.values())
    for (name, text), before, now in zip(documents.items(), position.documents, checksums, strict=True):
        if before != now:
            parts.append((name, text))

    events = store.reading(histories.read_events)(
        job_id,
        after=position.event,
        limit=_NEW_AT_ONCE,
        tail=histories.MAX_EVENTS if position.event == 0 else None,
    )
    if events or first:
        parts.append(("events", to_json(events).decode()))
    lines = []
    if logs:
        tail = _MAX_LOG_LINES if position.log == 0 else None
        lines = store.reading(histories.read_logs)(job_id, after=position.log, tail=tail, limit=_NEW_AT_ONCE)
        if lines or first:
            parts.append(("logs", _LINES.dump_json(lines).decode()))

    reached = Position(
        event=events[-1].seq if events else position.event,
        step=series.step[-1] if series.step else after,
        log=lines[-1].seq if lines else position.log,
        # the store rounds the times to 0.01 s: without more, a time rounded down would give the last sample again
        sampled_at=samples.at[-1] + 0.01 if samples.at else position.sampled_at,
        documents=(checksums[0], checksums[1], checksums[2]),
        version=version,
    )
    *before_last, (name, text) = parts
    chunks = [sse_event(text, event=name) for name, text in before_last]
    return (*chunks, sse_event(text, event=name, event_id=reached.id)), reached


def _columns(columns: BaseModel, *, is_first: bool) -> str:
    return json.dumps({"replace": is_first, "columns": columns.model_dump(mode="json")}, separators=(",", ":"))
