"""Reads what was stored of a job: events, logs, series, incidents, workers, versions of its spec, and its whole page.

Of long histories the newest part is read; two jobs are compared by their losses of every step.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import Row, func, select

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.catalogue import describe
from shoal_service.core.parity import DEFAULT_TOLERANCE, compare, differences
from shoal_service.store import curves
from shoal_service.store.checkpoint_rows import with_pins
from shoal_service.store.curves import point_of
from shoal_service.store.database import Transaction
from shoal_service.store.errors import JobNotFound
from shoal_service.store.records import (
    load,
    load_spec,
    load_view,
    num_of,
    read_document,
    workers_of,
)
from shoal_service.store.tables import checkpoints, events, incidents, job_specs, jobs, logs, series
from shoal_service.views import (
    CheckpointView,
    EventView,
    IncidentView,
    JobOverview,
    LogView,
    ParityView,
    SampleColumns,
    SeriesColumns,
    SpecVersion,
    WorkerView,
)
from shoal_workers.contract import JobSpec, JobState

MAX_CHECKPOINTS = 50
MAX_EVENTS = 100
MAX_INCIDENTS = 100
MAX_POINTS = 500
_ROWS_AT_ONCE = 5_000


def read_events(
    tx: Transaction, job_id: str, *, after: int = 0, limit: int = 500, tail: int | None = None
) -> list[EventView]:
    """Reads events in the order of their numbers: those after `after`, at most `limit`; of these only the newest
    `tail`."""
    query = select(events.c.seq, events.c.at, events.c.type, events.c.data).where(
        events.c.job_num == num_of(tx, job_id), events.c.seq > after
    )
    if tail is None:
        return [_event(row) for row in tx.execute(query.order_by(events.c.seq).limit(limit))]
    newest = tx.execute(query.order_by(events.c.seq.desc()).limit(min(tail, limit))).all()
    return [_event(row) for row in newest[::-1]]


def read_event_numbers(tx: Transaction, job_ids: Collection[str]) -> dict[str, int]:
    """The number of the last event of each of these jobs that exist."""
    query = select(jobs.c.id, jobs.c.event_seq).where(jobs.c.id.in_(sorted(job_ids)))
    return {row.id: row.event_seq for row in tx.execute(query)} if job_ids else {}


def read_logs(
    tx: Transaction,
    job_id: str,
    *,
    rank: int | None = None,
    after: int | None = None,
    tail: int | None = None,
    limit: int = 1000,
) -> list[LogView]:
    """Reads lines in the order of their numbers: those after `after`, or the newest `tail` lines; at most `limit`."""
    query = select(logs).where(logs.c.job_num == num_of(tx, job_id))
    if rank is not None:
        query = query.where(logs.c.rank == rank)
    if after is not None:
        query = query.where(logs.c.seq > after)
    if tail is None:
        rows = tx.execute(query.order_by(logs.c.seq).limit(limit)).mappings().all()
    else:
        newest = tx.execute(query.order_by(logs.c.seq.desc()).limit(min(tail, limit))).mappings().all()
        rows = newest[::-1]
    return [LogView.model_validate({name: row[name] for name in LogView.model_fields}) for row in rows]


def read_series(
    tx: Transaction, job_id: str, *, after_step: int = 0, until_step: int | None = None, max_points: int | None = None
) -> list[SeriesPoint]:
    """Reads every step after `after_step` up to `until_step`; means over equal buckets of steps if they are more than
    `max_points`."""
    num = num_of(tx, job_id)
    if max_points is not None:
        return curves.read_curve(tx, num, after_step=after_step, until_step=until_step, max_points=max_points)
    query = select(series).where(series.c.job_num == num, series.c.step > after_step)
    return [point_of(row) for row in tx.execute(query.order_by(series.c.step))]


def read_series_page(
    tx: Transaction, job_id: str, *, after_step: int, until_step: int, limit: int
) -> list[SeriesPoint]:
    """Reads the first `limit` steps after `after_step` up to `until_step`."""
    query = select(series).where(
        series.c.job_num == num_of(tx, job_id), series.c.step > after_step, series.c.step <= until_step
    )
    return [point_of(row) for row in tx.execute(query.order_by(series.c.step).limit(limit))]


def read_workers(tx: Transaction, job_id: str) -> list[WorkerView]:
    document = tx.execute(select(jobs.c.workers).where(jobs.c.id == job_id)).scalar_one_or_none()
    if document is None:
        raise JobNotFound(job_id)
    return workers_of(document)


def read_workers_by_node(tx: Transaction) -> Counter[str]:
    """Counts the workers of all jobs that have not ended, by node id."""
    ended = [state.value for state in JobState if state.ended]
    documents = tx.execute(select(jobs.c.workers).where(jobs.c.state.not_in(ended))).scalars()
    return Counter(worker.node_id for document in documents for worker in workers_of(document) if worker.node_id)


def read_incidents(tx: Transaction, job_id: str) -> list[IncidentView]:
    query = (
        select(incidents.c.document)
        .where(incidents.c.job_num == num_of(tx, job_id))
        .order_by(incidents.c.attempt, incidents.c.id)
    )
    return [IncidentView.model_validate_json(text) for text in tx.execute(query).scalars()]


def overview(tx: Transaction, job_id: str) -> JobOverview:
    """Reads the whole page of a job. Raises JobNotFound."""
    num = num_of(tx, job_id)
    before = max(0, _last_event(tx, num) - MAX_EVENTS)
    return JobOverview.model_construct(
        job=load_view(tx, job_id),
        series=series_columns(tx, job_id),
        samples=curves.read_samples(tx, num),
        incidents=newest_incidents(tx, job_id),
        workers=tuple(read_workers(tx, job_id)),
        events=tuple(read_events(tx, job_id, after=before, limit=MAX_EVENTS)),
        checkpoints=newest_checkpoints(tx, job_id),
    )


def series_columns(
    tx: Transaction, job_id: str, *, after_step: int = -1, max_points: int = MAX_POINTS
) -> SeriesColumns:
    return _columns(read_series(tx, job_id, after_step=after_step, max_points=max_points))


def samples(tx: Transaction, job_id: str, *, after: float = 0.0) -> SampleColumns:
    """The accounts of a job over time, after `after`."""
    return curves.read_samples(tx, num_of(tx, job_id), after=after)


def job_version(tx: Transaction, job_id: str) -> tuple[JobState, tuple[float, int, int]]:
    """Reads a job's state, and what identifies its present content, with one small query. Raises JobNotFound."""
    query = select(jobs.c.state, jobs.c.updated_at, jobs.c.event_seq, jobs.c.log_seq).where(jobs.c.id == job_id)
    row = tx.execute(query).one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    return JobState(row.state), (row.updated_at, row.event_seq, row.log_seq)


def newest_events(
    tx: Transaction, job_id: str, *, after: int, limit: int, newest: int | None = None
) -> tuple[EventView, ...]:
    """Reads the events after number `after`. `newest`: at most this many of the newest."""
    if newest is not None:
        after = max(after, _last_event(tx, num_of(tx, job_id)) - newest)
    return tuple(read_events(tx, job_id, after=after, limit=limit))


def changed_jobs(tx: Transaction, since: float) -> dict[str, tuple[float, int, int]]:
    """Reads what identifies the present content of each job that was changed at `since` or later, by id."""
    query = select(jobs.c.id, jobs.c.updated_at, jobs.c.event_seq, jobs.c.log_seq).where(jobs.c.updated_at >= since)
    return {row.id: (row.updated_at, row.event_seq, row.log_seq) for row in tx.execute(query)}


def newest_change(tx: Transaction) -> float:
    """When a job was changed last; 0: there is none."""
    return float(tx.execute(select(func.max(jobs.c.updated_at))).scalar() or 0.0)


def newest_incidents(tx: Transaction, job_id: str) -> tuple[IncidentView, ...]:
    query = (
        select(incidents.c.document)
        .where(incidents.c.job_num == num_of(tx, job_id))
        .order_by(incidents.c.attempt.desc(), incidents.c.id.desc())
        .limit(MAX_INCIDENTS)
    )
    shown = [IncidentView.model_validate_json(text) for text in tx.execute(query).scalars()]
    return tuple(reversed(shown))


def newest_checkpoints(tx: Transaction, job_id: str) -> tuple[CheckpointView, ...]:
    query = (
        select(checkpoints.c.document)
        .where(checkpoints.c.job_num == num_of(tx, job_id))
        .order_by(checkpoints.c.step.desc(), checkpoints.c.attempt.desc(), checkpoints.c.generation.desc())
        .limit(MAX_CHECKPOINTS)
    )
    checkpoints_read = [CheckpointView.model_validate_json(text) for text in tx.execute(query).scalars()]
    return tuple(reversed(with_pins(tx, jobs.c.id == job_id, checkpoints_read)))


def spec_versions(tx: Transaction, job_id: str) -> list[SpecVersion]:
    """Reads the versions of a spec, oldest first. What today's rules refuse is left out. Raises JobNotFound."""
    num = num_of(tx, job_id)
    query = (
        select(job_specs.c.version, job_specs.c.accepted_at, job_specs.c.document)
        .where(job_specs.c.job_num == num)
        .order_by(job_specs.c.version)
    )
    fallback = JobSpec.model_validate({"stop": {"steps": 1}})
    return [
        SpecVersion(
            version=row.version,
            accepted_at=row.accepted_at,
            spec=read_document(JobSpec, row.document, fallback).value,
        )
        for row in tx.execute(query)
    ]


def parity(
    tx: Transaction, job_id: str, against_id: str, *, tolerance: float = DEFAULT_TOLERANCE, max_points: int = 0
) -> ParityView:
    """Compares the losses of two jobs, step by step. `max_points` 0: no points. Raises JobNotFound."""
    job, against = load(tx, job_id), load(tx, against_id)
    specs = [load_spec(tx, job_row.num, job_row.spec_version) for job_row in (job, against)]
    losses, reference = (
        # NULL: the loss is not finite, or a script has not reported one
        ((step, loss) for step, loss in _losses(tx, job_row.num) if spec.script is None or not math.isnan(loss))
        for job_row, spec in zip((job, against), specs, strict=True)
    )
    report = compare(losses, reference, tolerance=tolerance, max_points=max_points)
    fields = dict(report) | {"differs_in": differences(*specs)}
    return ParityView(job_id=job.id, against_id=against.id, **fields)


def _event(row: Row[*tuple[Any, ...]]) -> EventView:
    data = json.loads(row.data)
    shown = describe(row.type, data)
    return EventView(seq=row.seq, at=row.at, type=row.type, severity=shown.severity, message=shown.message, data=data)


def _columns(points: Sequence[SeriesPoint]) -> SeriesColumns:
    return SeriesColumns.model_construct(
        step=tuple(point.step for point in points),
        at=tuple(round(point.at, 2) for point in points),
        loss=tuple(_short(point.loss) for point in points),
        val_loss=tuple(None if point.val_loss is None else _short(point.val_loss) for point in points),
        grad_norm=tuple(_short(point.grad_norm) for point in points),
        lr=tuple(_short(point.lr) for point in points),
        tokens_per_s=tuple(_short(point.tokens_per_s) for point in points),
        step_s=tuple(_rounded(point.step_s) for point in points),
        world_size=tuple(point.world_size for point in points),
        generation=tuple(point.generation for point in points),
        metrics=_metric_columns([point.metrics for point in points]),
        val_metrics=_metric_columns([point.val_metrics for point in points]),
    )


def _metric_columns(points: Sequence[dict[str, float]]) -> dict[str, tuple[float | None, ...]]:
    names = sorted({name for metrics in points for name in metrics})
    return {name: tuple(_short(metrics.get(name, math.nan)) for metrics in points) for name in names}


def _last_event(tx: Transaction, job_num: int) -> int:
    newest = select(events.c.seq).where(events.c.job_num == job_num).order_by(events.c.seq.desc()).limit(1)
    return int(tx.execute(newest).scalar() or 0)


def _short(value: float) -> float | None:
    return _rounded(value) if math.isfinite(value) else None


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _losses(tx: Transaction, job_num: int) -> Iterator[tuple[int, float]]:
    query = select(series.c.step, series.c.loss).where(series.c.job_num == job_num).order_by(series.c.step)
    rows = tx.execute(query.execution_options(yield_per=_ROWS_AT_ONCE))
    return ((step, math.nan if loss is None else loss) for step, loss in rows)
