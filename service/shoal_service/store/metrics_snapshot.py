"""The values of /metrics, in a few statements whose answers stay small with any number of jobs.

The database counts: jobs by an index, recoveries and checkpoints into buckets. Only live jobs are read one by one,
those with an attempt and those that have just ended; queued, paused and ended jobs appear only in the counts. A job's
row that has not changed yields the same object again, so that it is neither parsed nor rendered twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, Row, Select, and_, bindparam, case, func, not_, or_, select

from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.scheduling.market import DEFAULT_PROJECT
from shoal_service.fleet_views import IslandRound, ProjectView
from shoal_service.store import island_rounds, lease, queueing
from shoal_service.store.database import NEWEST_SPEC, Transaction, checkpoints, in_states, incidents, job_specs, jobs
from shoal_service.store.lease import Lease
from shoal_service.store.records import read_document, read_spec_text, read_status
from shoal_service.store.webhook_lanes import WebhookLag, read_lags
from shoal_service.telemetry.catalogue import (
    CHECKPOINT_SECONDS,
    INCIDENT_BYTES_MOVED,
    INCIDENT_STEPS_LOST,
    QUEUE_WAIT_SECONDS,
    RECOVERY_SECONDS,
    Histogram,
    IslandStanding,
    LiveJob,
    Metric,
    NewestCheckpoint,
    RecoveryPhase,
    StepTimes,
    WorkerSample,
)
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract import IncidentCause, JobState


@dataclass(frozen=True, slots=True)
class Snapshot:
    jobs_by_state: dict[JobState, int]
    live: tuple[LiveJob, ...]
    incidents_by_cause: dict[IncidentCause, int]
    """Incidents that are over: an open one may still get another cause."""
    open_incidents: dict[IncidentCause, int]
    recoveries: dict[tuple[IncidentCause, RecoveryPhase], Histogram]
    steps_lost: dict[IncidentCause, Histogram]
    bytes_moved: dict[IncidentCause, Histogram]
    checkpoints: Histogram
    queue_wait: Histogram
    """Seconds from the submission to the first start of each job that has started."""
    queued_since: dict[str, float]
    """When the job that has been in the queue longest entered it, by project."""
    projects: tuple[ProjectView, ...]
    """The defined projects, and `default`, which includes the jobs of projects that are not defined."""
    lease: Lease | None
    webhooks: dict[str, WebhookLag]
    """Lag of the hooks that fail now, by name."""


def read(tx: Transaction, live: LiveJobs, *, now: float) -> Snapshot:
    """Reads all values. `live`: what the caller has read before."""
    counted = tx.execute(_BY_STATE).all()
    incident_counts = [(IncidentCause(cause), is_over, count) for cause, is_over, count in tx.execute(_INCIDENTS)]
    return Snapshot(
        jobs_by_state={JobState(state): count for state, count in counted},
        live=live.read(tx, now=now),
        incidents_by_cause={cause: count for cause, is_over, count in incident_counts if is_over},
        open_incidents={cause: count for cause, is_over, count in incident_counts if not is_over},
        recoveries=_read_recoveries(tx),
        steps_lost=_by_cause(tx, _STEPS_LOST),
        bytes_moved=_by_cause(tx, _BYTES_MOVED),
        checkpoints=_make_histogram(tx.execute(_CHECKPOINTS).one()),
        queue_wait=_make_histogram(tx.execute(_WAITED).one()),
        queued_since=_queued_since(tx, (shown := _projects(tx))),
        projects=shown,
        lease=lease.read(tx),
        webhooks=read_lags(tx),
    )


def _projects(tx: Transaction) -> tuple[ProjectView, ...]:
    views = queueing.project_views(tx)
    shown = {view.name: view for view in views if view.is_defined or view.name == DEFAULT_PROJECT}
    for view in views:
        if view.name not in shown:
            rest = shown[DEFAULT_PROJECT]
            total = {key: getattr(rest, key) + getattr(view, key) for key in ("queued", "running", "workers", "share")}
            shown[DEFAULT_PROJECT] = rest.model_copy(update=total)
    return tuple(shown.values())


def _queued_since(tx: Transaction, shown: Sequence[ProjectView]) -> dict[str, float]:
    names, since_by_job = {state.name for state in shown}, dict[str, float]()
    for project, at in tx.execute(_QUEUED_SINCE):
        name = project if project in names else DEFAULT_PROJECT
        since_by_job[name] = min(at, since_by_job.get(name, at))
    return since_by_job


def _read_recoveries(tx: Transaction) -> dict[tuple[IncidentCause, RecoveryPhase], Histogram]:
    histograms: dict[tuple[IncidentCause, RecoveryPhase], Histogram] = {}
    width = len(RECOVERY_SECONDS.buckets) + 2
    for cause, *values in tx.execute(_RECOVERIES):
        for i, phase in enumerate(RecoveryPhase):
            histogram = _make_histogram(values[i * width : (i + 1) * width])
            if histogram.count:
                histograms[IncidentCause(cause), phase] = histogram
    return histograms


def _by_cause(tx: Transaction, query: Select[Any]) -> dict[IncidentCause, Histogram]:
    """Histograms of the closed incidents that have a value, by cause."""
    histograms = {IncidentCause(cause): _make_histogram(values) for cause, *values in tx.execute(query)}
    return {cause: histogram for cause, histogram in histograms.items() if histogram.count}


def _buckets(column: ColumnElement[Any], metric: Metric) -> list[ColumnElement[Any]]:
    """Columns of a histogram: for each bound the number of values at or below it, then the number and the sum of all
    values."""
    under = [func.coalesce(func.sum(case((column <= bound, 1), else_=0)), 0) for bound in metric.buckets]
    return [*under, func.count(column), func.coalesce(func.sum(column), 0.0)]


def _make_histogram(values: Sequence[Any]) -> Histogram:
    *under, count, total = values
    return Histogram(tuple(int(n) for n in under), int(count), float(total))


def _select_closed(*buckets: ColumnElement[Any]) -> Select[Any]:
    return select(incidents.c.cause, *buckets).where(incidents.c.closed).group_by(incidents.c.cause)


_BY_STATE = select(jobs.c.state, func.count()).group_by(jobs.c.state)
_WITH_ATTEMPT = in_states(ATTEMPT_STATES)
_IS_OVER = or_(incidents.c.closed, not_(and_(_WITH_ATTEMPT, incidents.c.attempt == jobs.c.attempt)))
"""An incident is over when it is closed, and at the latest with its attempt."""
_INCIDENTS = (
    select(incidents.c.cause, _IS_OVER, func.count())
    .join(jobs, jobs.c.num == incidents.c.job_num)
    .group_by(incidents.c.cause, _IS_OVER)
)
_QUEUED_SINCE = (
    select(jobs.c.project, func.min(func.coalesce(jobs.c.queued_at, jobs.c.created_at)))
    .where(jobs.c.state == JobState.QUEUED.value)
    .group_by(jobs.c.project)
)
_PHASES = [incidents.c[f"{phase.value}_s"] for phase in RecoveryPhase]
_RECOVERIES = _select_closed(*(part for phase in _PHASES for part in _buckets(phase, RECOVERY_SECONDS)))
_STEPS_LOST = _select_closed(*_buckets(incidents.c.steps_lost, INCIDENT_STEPS_LOST))
_BYTES_MOVED = _select_closed(*_buckets(incidents.c.bytes_moved, INCIDENT_BYTES_MOVED))
_CHECKPOINTS = select(*_buckets(checkpoints.c.seconds, CHECKPOINT_SECONDS)).where(
    checkpoints.c.committed_at.is_not(None)
)
_WAITED = select(*_buckets(jobs.c.started_at - jobs.c.created_at, QUEUE_WAIT_SECONDS)).where(
    jobs.c.started_at.is_not(None)
)
"""Statements are built once: that takes longer than to run them."""


GRACE_S = 60.0
"""A job's final values are shown for this long after its end, so that several scrapes see them."""
_NEWEST_CHECKPOINT = (
    select(checkpoints.c.document)
    .where(checkpoints.c.job_num == jobs.c.num, checkpoints.c.state == CheckpointState.COMMITTED.value)
    .order_by(checkpoints.c.step.desc(), checkpoints.c.attempt.desc(), checkpoints.c.generation.desc())
    .limit(1)
    .scalar_subquery()
)
_LIVE = (
    select(
        jobs.c.num,
        jobs.c.id,
        jobs.c.state,
        jobs.c.attempt,
        jobs.c.granted_workers,
        jobs.c.started_at,
        jobs.c.status,
        jobs.c.workers,
        jobs.c.step_times,
        job_specs.c.document.label("spec"),
        _NEWEST_CHECKPOINT.label("checkpoint"),
    )
    .join(job_specs, NEWEST_SPEC)
    .order_by(jobs.c.num)
)
_RUNNING = _LIVE.where(_WITH_ATTEMPT)
_ENDED = _LIVE.where(jobs.c.ended_at >= bindparam("since"), jobs.c.attempt > 0)

_MAX_ROUNDS = 21
"""Rounds of islands that are read of a ledger: one may be open."""
_WORKERS = TypeAdapter(tuple[WorkerSample, ...])

_Known = tuple[Row[*tuple[Any, ...]], LiveJob]
"""The row of a job, and what was made of it."""


class LiveJobs:
    """Keeps what one reader of the values has read before. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}

    def read(self, tx: Transaction, *, now: float) -> tuple[LiveJob, ...]:
        rows = [*tx.execute(_RUNNING), *tx.execute(_ENDED, {"since": now - GRACE_S})]
        with self._lock:
            values = {}
            for row in rows:
                known = self._known.get(row.num)
                if known is None or known[0] != row:
                    known = row, _make_job(row, known)
                values[row.num] = known
            standings = _read_standings(tx, (job for _, job in values.values()))
            for num, (row, job) in values.items():
                if job.island != (standing := standings.get(job.job_id)):
                    values[num] = row, replace(job, island=standing)
            self._known = values
        return tuple(job for _, job in values.values())


def _make_job(row: Row[*tuple[Any, ...]], known: _Known | None) -> LiveJob:
    """Makes a job of its row, and parses only the documents that have changed: with most steps that is the status
    alone."""
    before, job = known or (row, None)
    return LiveJob(
        job_id=row.id,
        state=JobState(row.state),
        spec=job.spec if job and before.spec == row.spec else read_spec_text(row.spec).value,
        attempt=row.attempt,
        granted_workers=row.granted_workers,
        started_at=row.started_at,
        status=read_status(row.status),
        workers=job.workers if job and before.workers == row.workers else _WORKERS.validate_json(row.workers),
        checkpoint=job.checkpoint if job and before.checkpoint == row.checkpoint else _parse_committed(row.checkpoint),
        step_times=StepTimes.read(row.step_times),
        island=job.island if job else None,
    )


def _read_standings(tx: Transaction, live: Iterable[LiveJob]) -> dict[str, IslandStanding]:
    """Read what the ledgers have of the islands that these jobs train, with one statement for each ledger."""
    ledgers: dict[str, tuple[IslandRound, ...]] = {}
    standings = {}
    for job in live:
        islands = job.spec.islands
        if islands is None or islands.run is None or islands.index is None:
            continue
        if islands.run not in ledgers:
            limit = _MAX_ROUNDS * islands.num_at_once
            ledgers[islands.run] = island_rounds.rounds(tx, islands.run, limit=limit)
        if ledgers[islands.run]:
            standings[job.job_id] = _find_standing(ledgers[islands.run], islands.index)
    return standings


def _find_standing(rounds: Sequence[IslandRound], island: int) -> IslandStanding:
    """`rounds`: the newest ones, the newest first."""
    decisions = [decision for row in rounds if (decision := row.decision) is not None]
    members = [{member.island for member in decision.members} for decision in decisions]
    own = zip(decisions, members, strict=True)
    is_member = [island in islands for decision, islands in own if island in islands | {*decision.absent}]
    arrivals = (arrival for row in rounds for arrival in row.arrived if arrival.island == island)
    newest = next(arrivals, None)
    return IslandStanding(
        rounds=decisions[0].round + 1 if decisions else 0,
        rounds_missed=[*is_member, True].index(True),
        waited_s=newest.waited_s if newest is not None else None,
    )


def _parse_committed(document: str | None) -> NewestCheckpoint | None:
    if document is None:
        return None
    unreadable = CheckpointView(step=0, url="", state=CheckpointState.COMMITTED, attempt=0, generation=0)
    view = read_document(CheckpointView, document, unreadable).value
    if view.committed_at is None:
        return None
    return NewestCheckpoint(bytes=view.bytes, seconds=view.seconds, committed_at=view.committed_at)
