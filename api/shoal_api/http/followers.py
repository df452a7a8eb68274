"""The sources of streams: the events of a job, its log, the job itself, the list of jobs. They implement
`streams.Follower`; the routes make one for each stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal_api.answers import StreamEnd, log_source
from shoal_api.http.long_poll import read_events
from shoal_api.http.streams import Batch, sse_event
from shoal_service.store import Store, histories
from shoal_service.views import JobSummary, LogView, Page
from shoal_workers.contract.job import JobState

_BATCH = 500


@dataclass(frozen=True, slots=True)
class LogSelection:
    """Which lines of a job's log."""

    rank: int | None = None
    """None: all ranks, and lines of workers without a rank."""
    after: int = 0
    tail: int | None = None
    """Number of last lines to begin with; 0: only lines that are yet to come."""


def read_lines(store: Store, job_id: str, lines: LogSelection, limit: int) -> tuple[list[LogView], int]:
    """Reads once: the last `tail` lines, or else the first `limit` lines; and the number after which the next ones are.

    Raises:
        JobNotFound
    """
    if lines.tail is None:
        with store.read() as tx:
            found = histories.read_logs(tx, job_id, rank=lines.rank, after=lines.after, limit=limit)
    else:
        newest = max(1, lines.tail)  # the newest one tells where the next ones begin, even if it is not wanted
        with store.read() as tx:
            found = histories.read_logs(tx, job_id, rank=lines.rank, after=lines.after, tail=newest, limit=newest)
    next_after = found[-1].seq if found else lines.after
    return ([] if lines.tail == 0 else found), next_after


class EventFollower:
    """Every event after a number, without gaps; the number is the SSE id."""

    def __init__(self, store: Store, job_id: str, after: int) -> None:
        self._store = store
        self._job_id = job_id
        self._after = after

    def read(self) -> Batch:
        page = read_events(self._store, self._job_id, self._after, _BATCH)
        self._after = page.next_after
        chunks = [sse_event(event.model_dump_json(), event_id=event.seq) for event in page.items]
        if page.ended:
            chunks.append(_end(self._store, self._job_id))
        return Batch(tuple(chunks), more=len(page.items) == _BATCH, ended=page.ended)


class LogFollower:
    """Every line of the log after a number, as server-sent events or as plain text."""

    def __init__(self, store: Store, job_id: str, lines: LogSelection, *, plain: bool) -> None:
        self._store = store
        self._job_id = job_id
        self._lines = lines
        self._after = lines.after
        self._plain = plain

    def read(self) -> Batch:
        state = self._store.get_job(self._job_id).status.state
        logs, self._after = read_lines(self._store, self._job_id, replace(self._lines, after=self._after), _BATCH)
        more = self._lines.tail is None and len(logs) == _BATCH
        self._lines = replace(self._lines, tail=None)  # the next lines are new ones
        ended = state.ended and not more
        if self._plain:
            return Batch(tuple(plain_line(line).encode() for line in logs), more=more, ended=ended)
        chunks = [sse_event(line.model_dump_json(), event_id=line.seq) for line in logs]
        return Batch((*chunks, _end(self._store, self._job_id)) if ended else tuple(chunks), more=more, ended=ended)


class JobFollower:
    """The job, after each change, as events `job`."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._store = store
        self._job_id = job_id
        self._sent = ""

    def read(self) -> Batch:
        job = self._store.get_job(self._job_id)
        body = job.model_dump_json()
        state = job.status.state
        chunks = [] if body == self._sent else [sse_event(body, event="job")]
        self._sent = body
        if state.ended:
            chunks.append(_end(self._store, self._job_id))
        return Batch(tuple(chunks), ended=state.ended)


class JobListFollower:
    """One page of the job list, after each change, as events `jobs`."""

    def __init__(self, page_of: Callable[[], Page[JobSummary]]) -> None:
        self._page_of = page_of
        self._sent = ""

    def read(self) -> Batch:
        body = self._page_of().model_dump_json()
        if body == self._sent:
            return Batch(())
        self._sent = body
        return Batch((sse_event(body, event="jobs"),))


class FleetFollower:
    """The overview of all jobs, after each change, as events `fleet`."""

    def __init__(self, body_of: Callable[[], str]) -> None:
        self._body_of = body_of
        self._sent = ""

    def read(self) -> Batch:
        body = self._body_of()
        if body == self._sent:
            return Batch(())
        self._sent = body
        return Batch((sse_event(body, event="fleet"),))


def plain_line(line: LogView) -> str:
    """One line of a log for people. The text comes from users' code, so control characters are replaced."""
    text = "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line.text.rstrip("\r\n"))
    return f"[{log_source(line)}] {text}\n"


def end_event(state: JobState) -> bytes:
    """The last event of a stream about a job that has ended."""
    return sse_event(StreamEnd(state=state).model_dump_json(), event="end")


def _end(store: Store, job_id: str) -> bytes:
    return end_event(store.get_job(job_id).status.state)
