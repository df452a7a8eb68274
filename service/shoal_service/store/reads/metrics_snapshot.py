"""The values of /metrics, in a few statements whose answers stay small with any number of jobs. Called by `Store`.

The database counts: jobs by an index, recoveries and checkpoints into buckets. Only jobs with an attempt are read one
by one; queued, paused and ended jobs appear only in the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Row, case, func, select

from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.scheduling.market import DEFAULT_PROJECT
from shoal_service.queue_views import ProjectView
from shoal_service.store import lease as leases
from shoal_service.store.lease import Lease
from shoal_service.store.records import read_status
from shoal_service.store.scheduling import projects
from shoal_service.store.tables import checkpoints, incidents, jobs
from shoal_service.telemetry.metric_names import (
    CHECKPOINT_SECONDS,
    INCIDENT_BYTES_MOVED,
    INCIDENT_STEPS_LOST,
    QUEUE_WAIT_SECONDS,
    RECOVERY_SECONDS,
    LiveJob,
    Metric,
    RecoveryPhase,
)
from shoal_service.views import CheckpointState
from shoal_workers.contract.job import IncidentCause, JobState


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of observations at or below each bound (cumulative), number of all, and their sum."""

    counts: tuple[int, ...]
    count: int
    total: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    jobs_by_state: dict[JobState, int]
    live: tuple[LiveJob, ...]
    incidents_by_cause: dict[IncidentCause, int]
    recoveries: dict[tuple[IncidentCause, RecoveryPhase], Histogram]
    steps_lost: dict[IncidentCause, Histogram]
    bytes_moved: dict[IncidentCause, Histogram]
    checkpoints: Histogram
    queue_wait: Histogram
    """Seconds from the submission to the first start of each job that has started."""
    projects: tuple[ProjectView, ...]
    """The defined ones and `default`, which includes the jobs of projects that are not defined."""
    lease: Lease | None


def read(connection: Connection) -> Snapshot:
    counted = connection.execute(select(jobs.c.state, func.count()).group_by(jobs.c.state)).all()
    caused = connection.execute(select(incidents.c.cause, func.count()).group_by(incidents.c.cause)).all()
    return Snapshot(
        jobs_by_state={JobState(state): count for state, count in counted},
        live=_live(connection),
        incidents_by_cause={IncidentCause(cause): count for cause, count in caused},
        recoveries=_recoveries(connection),
        steps_lost=_by_cause(connection, incidents.c.steps_lost, INCIDENT_STEPS_LOST),
        bytes_moved=_by_cause(connection, incidents.c.bytes_moved, INCIDENT_BYTES_MOVED),
        checkpoints=_checkpoints(connection),
        queue_wait=_queue_wait(connection),
        projects=_projects(connection),
        lease=leases.current(connection),
    )


def _queue_wait(connection: Connection) -> Histogram:
    waited = jobs.c.started_at - jobs.c.created_at
    under = [func.coalesce(func.sum(case((waited <= bound, 1), else_=0)), 0) for bound in QUEUE_WAIT_SECONDS.buckets]
    query = select(*under, func.count(), func.coalesce(func.sum(waited), 0.0)).where(jobs.c.started_at.is_not(None))
    return _histogram(connection.execute(query).one())


def _projects(connection: Connection) -> tuple[ProjectView, ...]:
    views = projects.views(connection)
    shown = {one.name: one for one in views if one.is_defined or one.name == DEFAULT_PROJECT}
    for one in views:
        if one.name not in shown:
            rest = shown[DEFAULT_PROJECT]
            total = {key: getattr(rest, key) + getattr(one, key) for key in ("queued", "running", "workers", "share")}
            shown[DEFAULT_PROJECT] = rest.model_copy(update=total)
    return tuple(shown.values())


def _live(connection: Connection) -> tuple[LiveJob, ...]:
    newest = (
        select(checkpoints.c.bytes)
        .where(checkpoints.c.job_num == jobs.c.num, checkpoints.c.state == CheckpointState.COMMITTED.value)
        .order_by(checkpoints.c.step.desc(), checkpoints.c.attempt.desc(), checkpoints.c.generation.desc())
        .limit(1)
        .scalar_subquery()
    )
    states = sorted(state.value for state in ATTEMPT_STATES)
    query = (
        select(jobs.c.id, jobs.c.granted_workers, jobs.c.status, newest.label("bytes"))
        .where(jobs.c.state.in_(states))
        .order_by(jobs.c.num)
    )
    return tuple(_live_job(row) for row in connection.execute(query))


def _live_job(row: Row[*tuple[Any, ...]]) -> LiveJob:
    return LiveJob(
        job_id=row.id,
        granted_workers=row.granted_workers,
        checkpoint_bytes=row.bytes,
        status=read_status(row.status),
    )


def _recoveries(connection: Connection) -> dict[tuple[IncidentCause, RecoveryPhase], Histogram]:
    bounds = RECOVERY_SECONDS.buckets
    phases = list(RecoveryPhase)
    buckets = [part for phase in phases for part in _buckets(incidents.c[f"{phase.value}_s"], bounds)]
    query = select(incidents.c.cause, *buckets).where(incidents.c.closed).group_by(incidents.c.cause)
    found: dict[tuple[IncidentCause, RecoveryPhase], Histogram] = {}
    width = len(bounds) + 2
    for cause, *values in connection.execute(query):
        for i, phase in enumerate(phases):
            histogram = _histogram(values[i * width : (i + 1) * width])
            if histogram.count:
                found[IncidentCause(cause), phase] = histogram
    return found


def _by_cause(connection: Connection, column: Column[Any], metric: Metric) -> dict[IncidentCause, Histogram]:
    """Of closed incidents that have a value."""
    query = select(incidents.c.cause, *_buckets(column, metric.buckets)).where(incidents.c.closed)
    found = {
        IncidentCause(cause): _histogram(values)
        for cause, *values in connection.execute(query.group_by(incidents.c.cause))
    }
    return {cause: histogram for cause, histogram in found.items() if histogram.count}


def _checkpoints(connection: Connection) -> Histogram:
    query = select(*_buckets(checkpoints.c.seconds, CHECKPOINT_SECONDS.buckets)).where(
        checkpoints.c.committed_at.is_not(None)
    )
    return _histogram(list(connection.execute(query).one()))


def _buckets(column: Column[Any], bounds: Sequence[float]) -> list[ColumnElement[Any]]:
    """For each bound the number of values at or below it, then the number and the sum of all values."""
    under = [func.coalesce(func.sum(case((column <= bound, 1), else_=0)), 0) for bound in bounds]
    return [*under, func.count(column), func.coalesce(func.sum(column), 0.0)]


def _histogram(values: Sequence[Any]) -> Histogram:
    *under, count, total = values
    return Histogram(tuple(int(n) for n in under), int(count), float(total))
