"""The overview of one job, and the columns of its series."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqlalchemy import Connection, select

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.store.reads.documents import read as read_document
from shoal_service.store.reads.history import with_pins
from shoal_service.store.tables import checkpoints, events, incidents, job_specs, jobs
from shoal_service.views import CheckpointView, IncidentView, SeriesColumns, SpecVersion
from shoal_workers.contract.spec import JobSpec

MAX_POINTS = 500
MAX_INCIDENTS = 100
MAX_EVENTS = 100
MAX_CHECKPOINTS = 50


def columns(points: Sequence[SeriesPoint]) -> SeriesColumns:
    return SeriesColumns.model_construct(
        step=tuple(point.step for point in points),
        at=tuple(round(point.at, 2) for point in points),
        loss=tuple(_short(point.loss) for point in points),
        val_loss=tuple(None if point.val_loss is None else _short(point.val_loss) for point in points),
        grad_norm=tuple(_short(point.grad_norm) for point in points),
        lr=tuple(_rounded(point.lr) for point in points),
        tokens_per_s=tuple(_rounded(point.tokens_per_s) for point in points),
        step_s=tuple(_rounded(point.step_s) for point in points),
        world_size=tuple(point.world_size for point in points),
        generation=tuple(point.generation for point in points),
        metrics=_metric_columns([point.metrics for point in points]),
        val_metrics=_metric_columns([point.val_metrics for point in points]),
    )


def _metric_columns(points: Sequence[dict[str, float]]) -> dict[str, tuple[float | None, ...]]:
    names = sorted({name for metrics in points for name in metrics})
    return {name: tuple(_short(metrics.get(name, math.nan)) for metrics in points) for name in names}


def newest_incidents(connection: Connection, job_num: int) -> tuple[IncidentView, ...]:
    query = (
        select(incidents.c.document)
        .where(incidents.c.job_num == job_num)
        .order_by(incidents.c.attempt.desc(), incidents.c.id.desc())
        .limit(MAX_INCIDENTS)
    )
    found = [IncidentView.model_validate_json(text) for text in connection.execute(query).scalars()]
    return tuple(reversed(found))


def newest_checkpoints(connection: Connection, job_num: int) -> tuple[CheckpointView, ...]:
    query = (
        select(checkpoints.c.document)
        .where(checkpoints.c.job_num == job_num)
        .order_by(checkpoints.c.step.desc(), checkpoints.c.attempt.desc(), checkpoints.c.generation.desc())
        .limit(MAX_CHECKPOINTS)
    )
    found = [CheckpointView.model_validate_json(text) for text in connection.execute(query).scalars()]
    return tuple(reversed(with_pins(connection, jobs.c.num == job_num, found)))


def last_event(connection: Connection, job_num: int) -> int:
    newest = select(events.c.seq).where(events.c.job_num == job_num).order_by(events.c.seq.desc()).limit(1)
    return int(connection.execute(newest).scalar() or 0)


def spec_versions(connection: Connection, job_id: str) -> list[SpecVersion]:
    """Oldest first. What today's rules refuse is left out."""
    query = (
        select(job_specs.c.version, job_specs.c.accepted_at, job_specs.c.document)
        .join(jobs, jobs.c.num == job_specs.c.job_num)
        .where(jobs.c.id == job_id)
        .order_by(job_specs.c.version)
    )
    fallback = JobSpec.model_validate({"stop": {"steps": 1}})
    return [
        SpecVersion(
            version=row.version,
            accepted_at=row.accepted_at,
            spec=read_document(JobSpec, row.document, fallback).value,
        )
        for row in connection.execute(query)
    ]


def _short(value: float) -> float | None:
    return _rounded(value) if math.isfinite(value) else None


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
