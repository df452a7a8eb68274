"""The values of /metrics, in a few statements whose answers stay small with any number of jobs. Called by `Store`.

The database counts: jobs by an index, recoveries and checkpoints into buckets. Only live jobs are read one by one
(reads/live_jobs.py); queued, paused and ended jobs appear only in the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Select, and_, case, func, not_, or_, select

from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.scheduling.market import DEFAULT_PROJECT
from shoal_service.fleet_views import ProjectView
from shoal_service.store import lease as leases
from shoal_service.store.lease import Lease
from shoal_service.store.reads.live_jobs import LiveJobs
from shoal_service.store.scheduling import projects
from shoal_service.store.tables import checkpoints, incidents, jobs
from shoal_service.store.webhooks.reads import WebhookLag, lags
from shoal_service.telemetry.metric import Histogram, LiveJob, Metric, RecoveryPhase
from shoal_service.telemetry.service_metrics import (
    CHECKPOINT_SECONDS,
    INCIDENT_BYTES_MOVED,
    INCIDENT_STEPS_LOST,
    QUEUE_WAIT_SECONDS,
    RECOVERY_SECONDS,
)
from shoal_workers.contract.job import IncidentCause, JobState


@dataclass(frozen=True, slots=True)
class Snapshot:
    jobs_by_state: dict[JobState, int]
    live: tuple[LiveJob, ...]
    incidents_by_cause: dict[IncidentCause, int]
    """Those that are over: an open one may still get another cause."""
    open_incidents: dict[IncidentCause, int]
    recoveries: dict[tuple[IncidentCause, RecoveryPhase], Histogram]
    steps_lost: dict[IncidentCause, Histogram]
    bytes_moved: dict[IncidentCause, Histogram]
    checkpoints: Histogram
    queue_wait: Histogram
    """Seconds from the submission to the first start of each job that has started."""
    queued_since: dict[str, float]
    """By project: when the job that has been in the queue longest entered it."""
    projects: tuple[ProjectView, ...]
    """The defined ones and `default`, which includes the jobs of projects that are not defined."""
    lease: Lease | None
    webhooks: dict[str, WebhookLag]
    """Lag of the hooks that fail now, by name."""


def read(connection: Connection, live: LiveJobs, *, now: float) -> Snapshot:
    counted = connection.execute(select(jobs.c.state, func.count()).group_by(jobs.c.state)).all()
    return Snapshot(
        jobs_by_state={JobState(state): count for state, count in counted},
        live=live.read(connection, now=now),
        incidents_by_cause=_incidents(connection, is_over=True),
        open_incidents=_incidents(connection, is_over=False),
        recoveries=_recoveries(connection),
        steps_lost=_by_cause(connection, incidents.c.steps_lost, INCIDENT_STEPS_LOST),
        bytes_moved=_by_cause(connection, incidents.c.bytes_moved, INCIDENT_BYTES_MOVED),
        checkpoints=_checkpoints(connection),
        queue_wait=_queue_wait(connection),
        queued_since=_queued_since(connection, (shown := _projects(connection))),
        projects=shown,
        lease=leases.current(connection),
        webhooks=lags(connection),
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


def _incidents(connection: Connection, *, is_over: bool) -> dict[IncidentCause, int]:
    """An incident is over when it is closed, and at the latest with its attempt."""
    states = sorted(state.value for state in ATTEMPT_STATES)
    is_current = and_(jobs.c.state.in_(states), incidents.c.attempt == jobs.c.attempt)
    over = or_(incidents.c.closed, not_(is_current))
    query = (
        select(incidents.c.cause, func.count())
        .join(jobs, jobs.c.num == incidents.c.job_num)
        .where(over if is_over else not_(over))
        .group_by(incidents.c.cause)
    )
    return {IncidentCause(cause): count for cause, count in connection.execute(query)}


def _queued_since(connection: Connection, shown: Sequence[ProjectView]) -> dict[str, float]:
    since = func.min(func.coalesce(jobs.c.queued_at, jobs.c.created_at))
    query = select(jobs.c.project, since).where(jobs.c.state == JobState.QUEUED.value).group_by(jobs.c.project)
    names, found = {one.name for one in shown}, dict[str, float]()
    for project, at in connection.execute(query):
        name = project if project in names else DEFAULT_PROJECT
        found[name] = min(at, found.get(name, at))
    return found


@cache
def _recoveries_query() -> Select[*tuple[Any, ...]]:
    """Made once: it has some hundred columns."""
    bounds = RECOVERY_SECONDS.buckets
    buckets = [part for phase in RecoveryPhase for part in _buckets(incidents.c[f"{phase.value}_s"], bounds)]
    return select(incidents.c.cause, *buckets).where(incidents.c.closed).group_by(incidents.c.cause)


def _recoveries(connection: Connection) -> dict[tuple[IncidentCause, RecoveryPhase], Histogram]:
    phases = list(RecoveryPhase)
    found: dict[tuple[IncidentCause, RecoveryPhase], Histogram] = {}
    width = len(RECOVERY_SECONDS.buckets) + 2
    for cause, *values in connection.execute(_recoveries_query()):
        for i, phase in enumerate(phases):
            histogram = _histogram(values[i * width : (i + 1) * width])
            if histogram.count:
                found[IncidentCause(cause), phase] = histogram
    return found


@cache
def _by_cause_query(column: Column[Any], metric: Metric) -> Select[*tuple[Any, ...]]:
    query = select(incidents.c.cause, *_buckets(column, metric.buckets)).where(incidents.c.closed)
    return query.group_by(incidents.c.cause)


def _by_cause(connection: Connection, column: Column[Any], metric: Metric) -> dict[IncidentCause, Histogram]:
    """Histograms of the closed incidents that have a value, by cause."""
    rows = connection.execute(_by_cause_query(column, metric))
    found = {IncidentCause(cause): _histogram(values) for cause, *values in rows}
    return {cause: histogram for cause, histogram in found.items() if histogram.count}


@cache
def _checkpoints_query() -> Select[*tuple[Any, ...]]:
    buckets = _buckets(checkpoints.c.seconds, CHECKPOINT_SECONDS.buckets)
    return select(*buckets).where(checkpoints.c.committed_at.is_not(None))


def _checkpoints(connection: Connection) -> Histogram:
    return _histogram(list(connection.execute(_checkpoints_query()).one()))


def _buckets(column: Column[Any], bounds: Sequence[float]) -> list[ColumnElement[Any]]:
    """For each bound the number of values at or below it, then the number and the sum of all values."""
    under = [func.coalesce(func.sum(case((column <= bound, 1), else_=0)), 0) for bound in bounds]
    return [*under, func.count(column), func.coalesce(func.sum(column), 0.0)]


def _histogram(values: Sequence[Any]) -> Histogram:
    *under, count, total = values
    return Histogram(tuple(int(n) for n in under), int(count), float(total))
