"""The stream of a job's overview: first everything, then what has changed, as one server-sent event per part.

    job, series, samples, incidents, workers, events, checkpoints, logs       and `end`

`series`, `events` and `logs` continue what was sent before, and `samples` too: those of the first answer have `replace`
set. The other parts are complete each time. The id of an event says how far the client is, so that a client that comes
back gets only what it lacks.

All clients of a job that are equally far get the same bytes, which are made once: the cost of a change does not grow
with the number of open pages.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json

from shoal_api.http.followers import end_event
from shoal_api.http.streams import Batch, sse_event
from shoal_service.overview_views import SampleColumns
from shoal_service.store import Store
from shoal_workers.contract.job import JobState

POSITION = r"^([0-9]{1,18}\.[0-9]{1,18}\.[0-9]{1,18})?$"
"""An id of this stream: the numbers of the last event, step and line of the log."""
_BATCH = 1000
_MAX_LOG_LINES = 500
"""Log lines in the first answer, at most."""
_MAX_POINTS = 500
_KEPT = 256
_Version = tuple[float, int, int]


@dataclass(frozen=True, slots=True)
class Position:
    """What a client has."""

    event: int = 0
    step: int = -1
    log: int = 0
    sampled_at: float = 0.0
    documents: tuple[int, int, int] = (0, 0, 0)
    """Checksums of its incidents, workers and checkpoints."""
    version: _Version | None = None
    """None: it has just connected."""

    @classmethod
    def parse(cls, event_id: str) -> Position:
        event, step, log = map(int, event_id.split("."))
        return cls(event=event, step=step, log=log)

    @property
    def id(self) -> str:
        return f"{self.event}.{max(0, self.step)}.{self.log}"


class OverviewCache:
    """The newest parts that were made, for all streams of an application. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._made: OrderedDict[Any, tuple[tuple[bytes, ...], Position]] = OrderedDict()
        self._version_lock = threading.Lock()
        self._num_reads = 0
        """Reads of versions that have begun."""
        self._versions: OrderedDict[str, tuple[int, tuple[JobState, _Version]]] = OrderedDict()
        """By job: the newest one that was read, and the number of that read."""

    def version(self, job_id: str) -> tuple[JobState, _Version]:
        """The same as `Store.job_version`. Streams that ask at the same time share a read that has begun after they
        asked."""
        num_begun = self._num_reads
        with self._version_lock:
            known = self._versions.get(job_id)
            if known is None or known[0] <= num_begun:
                self._num_reads += 1
                known = self._num_reads, self._store.job_version(job_id)
                self._versions[job_id] = known
                if len(self._versions) > _KEPT:
                    self._versions.popitem(last=False)
            return known[1]

    def next(
        self, job_id: str, position: Position, version: _Version, *, logs: bool
    ) -> tuple[tuple[bytes, ...], Position]:
        """The parts after `position`, and the position after them."""
        key = (job_id, position, version, logs)
        with self._lock:  # held while they are made: others that want the same wait for them
            if key not in self._made:
                self._made[key] = _parts(self._store, job_id, position, version, logs=logs)
                if len(self._made) > _KEPT:
                    self._made.popitem(last=False)
            return self._made[key]


class OverviewFollower:
    """One client of one job. A `streams.Follower`."""

    def __init__(self, cache: OverviewCache, job_id: str, position: Position, *, logs: bool) -> None:
        self._cache = cache
        self._job_id = job_id
        self._position = position
        self._logs = logs

    def read(self) -> Batch:
        state, version = self._cache.version(self._job_id)
        chunks: tuple[bytes, ...] = ()
        before = self._position
        if version != before.version:
            chunks, self._position = self._cache.next(self._job_id, before, version, logs=self._logs)
        after = self._position
        more = after.event - before.event >= _BATCH or (self._logs and after.log - before.log >= _BATCH)
        if more:
            self._position = replace(after, version=None)
        elif state.ended:
            chunks = (*chunks, end_event(state))
        return Batch(chunks, more=more, ended=state.ended and not more)


def _parts(
    store: Store, job_id: str, position: Position, version: _Version, *, logs: bool
) -> tuple[tuple[bytes, ...], Position]:
    job = store.get_job(job_id)
    first = position.version is None
    parts: list[tuple[str, str]] = [("job", job.model_dump_json())]

    rolled_back = 0 < job.status.step < position.step
    after = job.status.step if rolled_back else position.step
    series = store.series_columns(job_id, after_step=after, max_points=_MAX_POINTS)
    if series.step or first:
        new = {"replace": position.step < 0, "columns": series.model_dump(mode="json")}
        parts.append(("series", json.dumps(new, separators=(",", ":"))))
    samples = store.samples(job_id, after=position.sampled_at)
    if samples.at or first:
        parts.append(("samples", _samples(samples, is_first=position.sampled_at == 0.0)))

    documents = {
        "incidents": to_json(store.newest_incidents(job_id)).decode(),
        "workers": to_json(store.workers(job_id)).decode(),
        "checkpoints": to_json(store.newest_checkpoints(job_id)).decode(),
    }
    checksums = tuple(zlib.crc32(text.encode()) for text in documents.values())
    for (name, text), before, now in zip(documents.items(), position.documents, checksums, strict=True):
        if before != now:
            parts.append((name, text))

    events = store.newest_events(
        job_id, after=position.event, limit=_BATCH, newest=100 if position.event == 0 else None
    )
    if events or first:
        parts.append(("events", to_json(events).decode()))
    lines = []
    if logs:
        tail = _MAX_LOG_LINES if position.log == 0 else None
        lines = store.logs(job_id, after=position.log, tail=tail, limit=_BATCH)
        if lines or first:
            parts.append(("logs", _LINES.dump_json(lines).decode()))

    reached = Position(
        event=events[-1].seq if events else position.event,
        step=series.step[-1] if series.step else after,
        log=lines[-1].seq if lines else position.log,
        sampled_at=samples.at[-1] + 0.01 if samples.at else position.sampled_at,
        documents=(checksums[0], checksums[1], checksums[2]),
        version=version,
    )
    chunks = [sse_event(text, event=name) for name, text in parts]
    chunks[-1] = sse_event(parts[-1][1], event=parts[-1][0], event_id=reached.id)
    return tuple(chunks), reached


def _samples(samples: SampleColumns, *, is_first: bool) -> str:
    new = {"replace": is_first, "columns": samples.model_dump(mode="json")}
    return json.dumps(new, separators=(",", ":"))


_LINES = TypeAdapter(list[Any])
