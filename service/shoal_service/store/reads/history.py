"""The histories of a job: events, logs, series, incidents, checkpoints, workers. Called by `Store`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, select

from shoal_service.core.downsampling import bucket_steps, downsample
from shoal_service.core.events.catalogue import describe
from shoal_service.store.errors import JobNotFound
from shoal_service.store.records import workers_of
from shoal_service.store.tables import checkpoints, events, incidents, jobs, logs, series
from shoal_service.views import CheckpointView, EventView, IncidentView, LogView, SeriesPoint, WorkerView
from shoal_workers.contract.job import JobState


def read_events(connection: Connection, job_id: str, *, after: int, limit: int) -> list[EventView]:
    query = (
        select(events.c.seq, events.c.at, events.c.type, events.c.data)
        .where(events.c.job_num == _num(connection, job_id), events.c.seq > after)
        .order_by(events.c.seq)
        .limit(limit)
    )
    return [_event(row) for row in connection.execute(query)]


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


def read_series(connection: Connection, job_id: str, *, after_step: int, max_points: int | None) -> list[SeriesPoint]:
    """Every step after `after_step`, or means over equal buckets of steps when there are more than `max_points`."""
    desired: ColumnElement[bool] = (series.c.job_num == _num(connection, job_id)) & (series.c.step > after_step)
    query = select(series).where(desired).order_by(series.c.step)
    if max_points is None:
        return list(_points(connection.execute(query)))
    extent = connection.execute(select(func.count(), func.min(series.c.step), func.max(series.c.step)).where(desired))
    count, first, last = extent.one()
    if count <= max_points:
        return list(_points(connection.execute(query)))
    rows = connection.execution_options(yield_per=1000).execute(query)
    return downsample(_points(rows), first_step=first, width=bucket_steps(first, last, max_points))


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
    return [CheckpointView.model_validate_json(text) for text in connection.execute(query).scalars()]


def _num(connection: Connection, job_id: str) -> int:
    num: int | None = connection.execute(select(jobs.c.num).where(jobs.c.id == job_id)).scalar_one_or_none()
    if num is None:
        raise JobNotFound(job_id)
    return num


def _points(rows: Any) -> Iterator[SeriesPoint]:
    return (_point(row) for row in rows)


def _point(row: Row[Any]) -> SeriesPoint:
    return SeriesPoint(
        step=row.step,
        at=row.at,
        loss=math.nan if row.loss is None else row.loss,
        grad_norm=math.nan if row.grad_norm is None else row.grad_norm,
        lr=row.lr,
        tokens_per_s=row.tokens_per_s,
        step_s=row.step_s,
        world_size=row.world_size,
        generation=row.generation,
        val_loss=row.val_loss,
    )
