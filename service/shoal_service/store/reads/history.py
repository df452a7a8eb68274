"""The histories of a job: events, logs, series, incidents, checkpoints, workers. Called by `Store`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, select

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.catalogue import describe
from shoal_service.store.errors import JobNotFound
from shoal_service.store.overview.rollups import point_of
from shoal_service.store.records import pins_of, read_status, workers_of
from shoal_service.store.tables import checkpoints, events, incidents, jobs, logs, series
from shoal_service.views import CheckpointState, CheckpointView, EventView, IncidentView, LogView, WorkerView
from shoal_workers.contract.job import JobState


def read_events(
    connection: Connection, job_id: str, *, after: int, limit: int, tail: int | None = None
) -> list[EventView]:
    """In the order of their numbers: those after `after`, at most `limit`; of these only the newest `tail`."""
    query = select(events.c.seq, events.c.at, events.c.type, events.c.data).where(
        events.c.job_num == _num(connection, job_id), events.c.seq > after
    )
    if tail is None:
        return [_event(row) for row in connection.execute(query.order_by(events.c.seq).limit(limit))]
    newest = connection.execute(query.order_by(events.c.seq.desc()).limit(min(tail, limit))).all()
    return [_event(row) for row in newest[::-1]]


def read_event_numbers(connection: Connection, job_ids: Collection[str]) -> dict[str, int]:
    """Number of the last event of each of these jobs that exist."""
    query = select(jobs.c.id, jobs.c.event_seq).where(jobs.c.id.in_(sorted(job_ids)))
    return {row.id: row.event_seq for row in connection.execute(query)} if job_ids else {}


def _event(row: Row[*tuple[Any, ...]]) -> EventView:
    data = json.loads(row.data)
    shown = describe(row.type, data)
    return EventView(seq=row.seq, at=row.at, type=row.type, severity=shown.severity, message=shown.message, data=data)


def read_logs(
    connection: Connection, job_id: str, *, rank: int | None, after: int | None, tail: int | None, limit: int
) -> list[LogView]:
    """Lines in the order of their numbers: those after `after`, or the newest `tail` lines; at most `limit`."""
    query = select(logs).where(logs.c.job_num == _num(connection, job_id))
    if rank is not None:
        query = query.where(logs.c.rank == rank)
    if after is not None:
        query = query.where(logs.c.seq > after)
    if tail is None:
        rows = connection.execute(query.order_by(logs.c.seq).limit(limit)).all()
    else:
        newest = connection.execute(query.order_by(logs.c.seq.desc()).limit(min(tail, limit))).all()
        rows = newest[::-1]
    return [LogView(seq=r.seq, at=r.at, rank=r.rank, worker_id=r.worker_id, stream=r.stream, text=r.text) for r in rows]


def read_series(connection: Connection, job_id: str, *, after_step: int) -> list[SeriesPoint]:
    """Every step after `after_step`; fewer points, from the roll-ups: `store/overview`."""
    query = select(series).where(series.c.job_num == _num(connection, job_id), series.c.step > after_step)
    return [point_of(row) for row in connection.execute(query.order_by(series.c.step))]


def read_series_page(
    connection: Connection, job_id: str, *, after_step: int, until_step: int, limit: int
) -> list[SeriesPoint]:
    """The first `limit` steps after `after_step` up to `until_step`."""
    query = select(series).where(
        series.c.job_num == _num(connection, job_id), series.c.step > after_step, series.c.step <= until_step
    )
    return [point_of(row) for row in connection.execute(query.order_by(series.c.step).limit(limit))]


def read_workers(connection: Connection, job_id: str) -> list[WorkerView]:
    document = connection.execute(select(jobs.c.workers).where(jobs.c.id == job_id)).scalar_one_or_none()
    if document is None:
        raise JobNotFound(job_id)
    return workers_of(document)


def read_workers_by_node(connection: Connection) -> Counter[str]:
    """How many workers of all jobs that have not ended are on each node, by node id."""
    ended = [state.value for state in JobState if state.ended]
    documents = connection.execute(select(jobs.c.workers).where(jobs.c.state.not_in(ended))).scalars()
    return Counter(worker.node_id for document in documents for worker in workers_of(document) if worker.node_id)


def read_incidents(connection: Connection, job_id: str) -> list[IncidentView]:
    query = (
        select(incidents.c.document)
        .where(incidents.c.job_num == _num(connection, job_id))
        .order_by(incidents.c.attempt, incidents.c.id)
    )
    return [IncidentView.model_validate_json(text) for text in connection.execute(query).scalars()]


def read_checkpoints(connection: Connection, job_id: str) -> list[CheckpointView]:
    key = (checkpoints.c.step, checkpoints.c.attempt, checkpoints.c.generation)
    query = select(checkpoints.c.document).where(checkpoints.c.job_num == _num(connection, job_id)).order_by(*key)
    found = [CheckpointView.model_validate_json(text) for text in connection.execute(query).scalars()]
    return with_pins(connection, jobs.c.id == job_id, found)


def with_pins(
    connection: Connection, of_job: ColumnElement[bool], found: Sequence[CheckpointView]
) -> list[CheckpointView]:
    """The checkpoints of a job, with the marks that are not a part of their rows: pinned, and among the best."""
    row = connection.execute(select(jobs.c.pins, jobs.c.status).where(of_job)).one()
    pins, standing = pins_of(row.pins), read_status(row.status).best
    ranked = {} if standing is None else {score.step: (n, score.value) for n, score in enumerate(standing.best, 1)}
    return [one.model_copy(update=_marks(one, pins, ranked)) for one in found]


def _marks(
    one: CheckpointView, pins: Sequence[str], ranked: Mapping[int, tuple[int, float]]
) -> dict[str, bool | int | float]:
    marks: dict[str, bool | int | float] = {"pinned": True} if one.name in pins else {}
    if one.state is CheckpointState.COMMITTED and one.step in ranked:
        rank, value = ranked[one.step]
        marks |= {"best": rank, "score": value}
    return marks


def _num(connection: Connection, job_id: str) -> int:
    num: int | None = connection.execute(select(jobs.c.num).where(jobs.c.id == job_id)).scalar_one_or_none()
    if num is None:
        raise JobNotFound(job_id)
    return num
