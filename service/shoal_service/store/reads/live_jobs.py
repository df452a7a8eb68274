"""LiveJobs: the jobs that have series of their own in /metrics, those with an attempt and those that have just ended.

A job's row that has not changed yields the same object again, so that it is neither parsed nor rendered twice.
"""

from __future__ import annotations

import threading
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Connection, Row, select

from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.store.driving import SpecCache
from shoal_service.store.reads.documents import read
from shoal_service.store.records import read_status
from shoal_service.store.tables import checkpoints, jobs
from shoal_service.telemetry.metric import LiveJob, NewestCheckpoint, WorkerSample
from shoal_service.telemetry.step_times import StepTimes
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract.job import JobState

GRACE_S = 60.0
"""A job's final values are shown for this long after its end, so that several scrapes see them."""
_NEWEST = (
    select(checkpoints.c.document)
    .where(checkpoints.c.job_num == jobs.c.num, checkpoints.c.state == CheckpointState.COMMITTED.value)
    .order_by(checkpoints.c.step.desc(), checkpoints.c.attempt.desc(), checkpoints.c.generation.desc())
    .limit(1)
    .scalar_subquery()
)
_LIVE = select(
    jobs.c.num,
    jobs.c.id,
    jobs.c.state,
    jobs.c.spec_version,
    jobs.c.attempt,
    jobs.c.granted_workers,
    jobs.c.started_at,
    jobs.c.status,
    jobs.c.workers,
    jobs.c.step_times,
    _NEWEST.label("checkpoint"),
).order_by(jobs.c.num)

_WORKERS = TypeAdapter(tuple[WorkerSample, ...])

_Known = tuple[Row[*tuple[Any, ...]], LiveJob]
"""A job, and the row that it was made of."""


class LiveJobs:
    """Thread-safe."""

    def __init__(self, specs: SpecCache) -> None:
        self._specs = specs
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}

    def read(self, connection: Connection, *, now: float) -> tuple[LiveJob, ...]:
        running = _LIVE.where(jobs.c.state.in_(sorted(state.value for state in ATTEMPT_STATES)))
        ended = _LIVE.where(jobs.c.ended_at >= now - GRACE_S, jobs.c.attempt > 0)
        rows = [row for query in (running, ended) for row in connection.execute(query)]
        with self._lock:
            found = {}
            for row in rows:
                known = self._known.get(row.num)
                if known is None or known[0] != row:
                    known = row, self._job(connection, row, known)
                found[row.num] = known
            self._known = found
        return tuple(job for _, job in found.values())

    def _job(self, connection: Connection, row: Row[*tuple[Any, ...]], known: _Known | None) -> LiveJob:
        """Parses only the documents that have changed: with most steps that is the status alone."""
        before, job = known or (row, None)
        return LiveJob(
            job_id=row.id,
            state=JobState(row.state),
            spec=self._specs.get(connection, row.num, row.spec_version).value,
            attempt=row.attempt,
            granted_workers=row.granted_workers,
            started_at=row.started_at,
            status=read_status(row.status),
            workers=job.workers if job and before.workers == row.workers else _WORKERS.validate_json(row.workers),
            checkpoint=job.checkpoint if job and before.checkpoint == row.checkpoint else _newest(row.checkpoint),
            step_times=StepTimes.read(row.step_times),
        )


def _newest(document: str | None) -> NewestCheckpoint | None:
    if document is None:
        return None
    unreadable = CheckpointView(step=0, url="", state=CheckpointState.COMMITTED, attempt=0, generation=0)
    view = read(CheckpointView, document, unreadable).value
    if view.committed_at is None:
        return None
    return NewestCheckpoint(bytes=view.bytes, seconds=view.seconds, committed_at=view.committed_at)
