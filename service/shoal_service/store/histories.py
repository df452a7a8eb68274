"""Reads the stored histories of a job: events, logs, series, incidents, workers, specs, checkpoints.

Reads the newest part of long histories, and compares two jobs by their losses of every step.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Column, Row, Select, func, select

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.catalogue import describe
from shoal_service.core.parity import DEFAULT_TOLERANCE, compare, differences
from shoal_service.store import curves
from shoal_service.store.checkpoint_rows import read_checkpoints
from shoal_service.store.curves import make_point
from shoal_service.store.database import Transaction, events, in_states, incidents, job_specs, jobs, logs, series
from shoal_service.store.errors import JobNotFound
from shoal_service.store.records import (
    load,
    load_spec,
    load_view,
    parse_workers,
    read_job_num,
    read_spec_text,
)
from shoal_service.views import (
    EventView,
    IncidentView,
    JobOverview,
    LogView,
    ParityView,
    SeriesColumns,
    SpecVersion,
    WorkerView,
)
from shoal_workers.contract import JobState

MAX_CHECKPOINTS = 50
MAX_EVENTS = 100
MAX_INCIDENTS = 100
MAX_POINTS = 500
_ROWS_AT_ONCE = 5_000


def read_events(
    tx: Transaction, job_id: str, *, after: int = 0, limit: int = 500, tail: int | None = None
) -> list[EventView]:
    """Read the first `limit` events after number `after`, or the newest `tail` of them."""
    query = select(events.c.seq, events.c.at, events.c.type, events.c.data).where(
        events.c.job_num == read_job_num(tx, job_id), events.c.seq > after
    )
    return [_make_event(row) for row in _read_by_number(tx, query, events.c.seq, limit=limit, tail=tail)]


def read_logs(
    tx: Transaction,
    job_id: str,
    *,
    rank: int | None = None,
    after: int | None = None,
    tail: int | None = None,
    limit: int = 1000,
) -> list[LogView]:
    """Read the first `limit` lines after number `after`, or the newest `tail` of them."""
    query = select(logs).where(logs.c.job_num == read_job_num(tx, job_id))
    if rank is not None:
        query = query.where(logs.c.rank == rank)
    if after is not None:
        query = query.where(logs.c.seq > after)
    rows = _read_by_number(tx, query, logs.c.seq, limit=limit, tail=tail)
    return [LogView.model_validate({name: getattr(row, name) for name in LogView.model_fields}) for row in rows]


def read_series(
    tx: Transaction,
    job_id: str,
    *,
    after_step: int = 0,
    until_step: int | None = None,
    limit: int | None = None,
) -> list[SeriesPoint]:
    """Read the first `limit` steps after `after_step` up to `until_step`."""
    query = select(series).where(series.c.job_num == read_job_num(tx, job_id), series.c.step > after_step)
    if until_step is not None:
        query = query.where(series.c.step <= until_step)
    return [make_point(row) for row in tx.execute(query.order_by(series.c.step).limit(limit))]


def read_workers(tx: Transaction, job_id: str) -> list[WorkerView]:
    row = tx.require_row(select(jobs.c.workers).where(jobs.c.id == job_id), JobNotFound(job_id))
    return parse_workers(row.workers)


def read_workers_by_node(tx: Transaction) -> Counter[str]:
    """Count the workers of all jobs that have not ended, by node id."""
    documents = tx.execute(
        select(jobs.c.workers).where(in_states(state for state in JobState if not state.ended))
    ).scalars()
    return Counter(worker.node_id for document in documents for worker in parse_workers(document) if worker.node_id)


def read_incidents(tx: Transaction, job_id: str, *, newest: int | None = None) -> list[IncidentView]:
    """Read the incidents in the order of their attempts; of many only the `newest`."""
    query = (
        select(incidents.c.document)
        .where(incidents.c.job_num == read_job_num(tx, job_id))
        .order_by(incidents.c.attempt.desc(), incidents.c.id.desc())
        .limit(newest)
    )
    return [IncidentView.model_validate_json(text) for text in tx.execute(query).scalars()][::-1]


def read_overview(tx: Transaction, job_id: str) -> JobOverview:
    """Read the whole page of a job. Raises JobNotFound."""
    return JobOverview.model_construct(
        job=load_view(tx, job_id),
        series=read_series_columns(tx, job_id),
        samples=curves.read_samples(tx, job_id),
        incidents=tuple(read_incidents(tx, job_id, newest=MAX_INCIDENTS)),
        workers=tuple(read_workers(tx, job_id)),
        events=tuple(read_events(tx, job_id, tail=MAX_EVENTS)),
        checkpoints=tuple(read_checkpoints(tx, job_id, newest=MAX_CHECKPOINTS)),
    )


def read_series_columns(
    tx: Transaction, job_id: str, *, after_step: int = -1, max_points: int = MAX_POINTS
) -> SeriesColumns:
    """Read the curve of a job as columns of rounded numbers."""
    points = curves.read_curve(tx, job_id, after_step=after_step, max_points=max_points)
    return SeriesColumns.model_construct(
        step=tuple(point.step for point in points),
        at=tuple(round(point.at, 2) for point in points),
        loss=tuple(_round_finite(point.loss) for point in points),
        val_loss=tuple(_round_finite(point.val_loss) for point in points),
        grad_norm=tuple(_round_finite(point.grad_norm) for point in points),
        lr=tuple(_round_finite(point.lr) for point in points),
        tokens_per_s=tuple(_round_finite(point.tokens_per_s) for point in points),
        step_s=tuple(_round(point.step_s) for point in points),
        world_size=tuple(point.world_size for point in points),
        generation=tuple(point.generation for point in points),
        metrics=_make_metric_columns([point.metrics for point in points]),
        val_metrics=_make_metric_columns([point.val_metrics for point in points]),
    )


def read_job_version(tx: Transaction, job_id: str) -> tuple[JobState, tuple[float, int, int]]:
    """Read a job's state, and what identifies its present content. Raises JobNotFound."""
    query = select(jobs.c.state, jobs.c.updated_at, jobs.c.event_seq, jobs.c.log_seq).where(jobs.c.id == job_id)
    row = tx.require_row(query, JobNotFound(job_id))
    return JobState(row.state), (row.updated_at, row.event_seq, row.log_seq)


def read_changed_jobs(tx: Transaction, since: float) -> dict[str, tuple[float, int, int]]:
    """Read what identifies the present content of each job that was changed at `since` or later, by id."""
    query = select(jobs.c.id, jobs.c.updated_at, jobs.c.event_seq, jobs.c.log_seq).where(jobs.c.updated_at >= since)
    return {row.id: (row.updated_at, row.event_seq, row.log_seq) for row in tx.execute(query)}


def read_last_change(tx: Transaction) -> float:
    """Return when a job was changed last; 0 if there is none."""
    return float(tx.execute(select(func.max(jobs.c.updated_at))).scalar() or 0.0)


def read_spec_versions(tx: Transaction, job_id: str) -> list[SpecVersion]:
    """Read the versions of a spec, oldest first, without what today's rules refuse. Raises JobNotFound."""
    num = read_job_num(tx, job_id)
    query = (
        select(job_specs.c.version, job_specs.c.accepted_at, job_specs.c.document)
        .where(job_specs.c.job_num == num)
        .order_by(job_specs.c.version)
    )
    return [
        SpecVersion(version=row.version, accepted_at=row.accepted_at, spec=read_spec_text(row.document).value)
        for row in tx.execute(query)
    ]


def compare_losses(
    tx: Transaction, job_id: str, against_id: str, *, tolerance: float = DEFAULT_TOLERANCE, max_points: int = 0
) -> ParityView:
    """Compare the losses of two jobs, step by step. Raises JobNotFound.

    Args:
        max_points: most points in the answer; 0 for the summary only.
    """
    job, against = load(tx, job_id), load(tx, against_id)
    specs = [load_spec(tx, job_row.num, job_row.spec_version) for job_row in (job, against)]
    losses, reference = (
        # NULL: the loss is not finite, or a script has not reported one
        ((step, loss) for step, loss in _read_losses(tx, job_row.num) if spec.script is None or not math.isnan(loss))
        for job_row, spec in zip((job, against), specs, strict=True)
    )
    report = compare(losses, reference, tolerance=tolerance, max_points=max_points)
    fields = dict(report) | {"differs_in": differences(*specs)}
    return ParityView(job_id=job.id, against_id=against.id, **fields)


def _read_by_number(
    tx: Transaction, query: Select[Any], number: Column[int], *, limit: int, tail: int | None
) -> Sequence[Row[*tuple[Any, ...]]]:
    """Read the first `limit` rows of a query, or the newest `tail` of them, in the order of their numbers."""
    if tail is None:
        return tx.execute(query.order_by(number).limit(limit)).all()
    return tx.execute(query.order_by(number.desc()).limit(min(tail, limit))).all()[::-1]


def _make_event(row: Row[*tuple[Any, ...]]) -> EventView:
    data = json.loads(row.data)
    description = describe(row.type, data)
    return EventView(
        seq=row.seq,
        at=row.at,
        type=row.type,
        severity=description.severity,
        message=description.message,
        data=data,
    )


def _make_metric_columns(points: Sequence[dict[str, float]]) -> dict[str, tuple[float | None, ...]]:
    names = sorted({name for metrics in points for name in metrics})
    return {name: tuple(_round_finite(metrics.get(name)) for metrics in points) for name in names}


def _round_finite(value: float | None) -> float | None:
    """Round a finite value; None for None, NaN and infinity."""
    return _round(value) if value is not None and math.isfinite(value) else None


def _round(value: float) -> float:
    """Round to six digits."""
    return float(f"{value:.6g}")


def _read_losses(tx: Transaction, job_num: int) -> Iterator[tuple[int, float]]:
    query = select(series.c.step, series.c.loss).where(series.c.job_num == job_num).order_by(series.c.step)
    rows = tx.execute(query.execution_options(yield_per=_ROWS_AT_ONCE))
    return ((step, math.nan if loss is None else loss) for step, loss in rows)
