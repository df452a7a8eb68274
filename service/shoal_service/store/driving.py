"""Reads and writes jobs for the control loop, under its lease (`store.write(epoch)`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from threading import Lock
from typing import Any, TypeAlias

from sqlalchemy import Column, Row, bindparam, select

from shoal_service.core import goodput
from shoal_service.core.desired import Desired
from shoal_service.core.events import (
    DriverFailed,
    JobEvent,
    JobGranted,
    JobPreempted,
    JobQuarantined,
    JobStaysInCluster,
)
from shoal_service.core.job_machine import ATTEMPT_STATES, AttemptBegun, Requeued, step
from shoal_service.core.quantities import count_text
from shoal_service.core.scheduling.market import WorkerFlow
from shoal_service.store import checkpoint_rows, supervisor_links
from shoal_service.store.database import Transaction, in_states, jobs
from shoal_service.store.edit import edit_job
from shoal_service.store.errors import JobEnded, RequestConflict
from shoal_service.store.records import (
    QUARANTINED,
    JobRow,
    Readable,
    describe_quarantine,
    make_status,
    parse_pins,
    parse_profile,
    read_spec,
)
from shoal_workers.contract import EndReason, IncidentCause, JobSpec, JobState
from shoal_workers.recently_used import RecentlyUsed

_CACHED_SPECS = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRow(JobRow):
    """A job that the control loop works on."""

    spec: JobSpec


class MoveKind(StrEnum):
    """A change that the scheduler made to a job's workers."""

    START = "start"
    GROW = "grow"
    SHRINK = "shrink"
    PREEMPT = "preempt"


_COLUMNS: tuple[Column[Any], ...] = (
    *(jobs.c.num, jobs.c.id, jobs.c.spec_version, jobs.c.state, jobs.c.desired, jobs.c.attempt, jobs.c.cluster),
    *(jobs.c.granted_workers, jobs.c.pulled_seq, jobs.c.created_at, jobs.c.priority),
    *(jobs.c.status, jobs.c.failure, jobs.c.pins, jobs.c.profile),
)
"""The columns of which a DriveRow is made: a third of the table's columns, and none of its longest."""
_KnownRows: TypeAlias = dict[int, tuple[tuple[Any, ...], DriveRow]]
"""The columns of each job, and what was made of them, by the job's number."""


class KnownJobs:
    """Keeps what one reader of the queue has read before, so that it parses only what has changed. Thread-safe.

    The columns of most jobs of a long queue do not change, and a version of a spec never does.
    """

    def __init__(self) -> None:
        self.rows: _KnownRows = {}
        self._lock = Lock()
        self._specs: RecentlyUsed[tuple[str, int], Readable[JobSpec]] = RecentlyUsed(_CACHED_SPECS)
        """By id of the job and version: SQLite gives the number of a deleted job to the next one."""

    def keep(self, rows: _KnownRows, *, is_whole: bool) -> None:
        """Keep rows. `is_whole`: all others are forgotten."""
        with self._lock:
            self.rows = rows if is_whole else {**self.rows, **rows}

    def read_spec(self, tx: Transaction, job_id: str, num: int, version: int) -> Readable[JobSpec]:
        key = (job_id, version)
        if (known := self._specs.get(key)) is not None:
            return known
        spec = read_spec(tx, num, version)
        if not spec.problem:  # else the row may be repaired
            self._specs.put(key, spec)
        return spec


def to_drive(
    tx: Transaction,
    known: KnownJobs | None = None,
    *,
    max_queued: int = 1000,
    unreadable: dict[str, str] | None = None,
) -> list[DriveRow]:
    """Reads all jobs with an attempt, oldest first; then the first `max_queued` jobs of the queue, in its order.

    Jobs whose spec cannot be read are left out; why is added to `unreadable`, by id. `known`: what the caller has read
    before.
    """
    known = known or KnownJobs()
    kept: _KnownRows = {}
    before_rows = known.rows
    needed = checkpoint_rows.held(tx)
    for row in chain(tx.execute(_HELD), tx.execute(_QUEUED, {"max_queued": max_queued})):
        num: int = row[0]
        values = tuple(row)  # compared faster than a Row
        if (before := before_rows.get(num)) is not None and before[0] == values:
            kept[num] = before  # and not the equal new values, which would only be garbage of the next read
        elif (drive := _make_drive_row(tx, known, row, unreadable)) is not None:
            kept[num] = values, drive
    known.keep(kept, is_whole=max_queued > 0)
    return [
        replace(drive, pins=tuple(sorted({*drive.pins, *needed[drive.id]}))) if drive.id in needed else drive
        for _, drive in kept.values()
    ]


_HELD = select(*_COLUMNS).where(in_states(ATTEMPT_STATES)).order_by(jobs.c.num)
_QUEUED = (
    select(*_COLUMNS)
    .where(jobs.c.state == JobState.QUEUED.value)
    .order_by(jobs.c.priority.desc(), jobs.c.num)
    .limit(bindparam("max_queued"))
)


def _make_drive_row(
    tx: Transaction, known: KnownJobs, row: Row[Any], unreadable: dict[str, str] | None
) -> DriveRow | None:
    spec = known.read_spec(tx, row.id, row.num, row.spec_version)
    if spec.problem:
        if unreadable is not None:
            unreadable[row.id] = describe_quarantine(spec)
        return None
    return DriveRow(
        id=row.id,
        spec=spec.value,
        spec_version=row.spec_version,
        state=JobState(row.state),
        desired=Desired(row.desired),
        attempt=row.attempt,
        granted_workers=row.granted_workers,
        pulled_seq=row.pulled_seq,
        cluster=row.cluster,
        created_at=row.created_at,
        priority=row.priority,
        status=make_status(row),
        pins=parse_pins(row.pins),
        profile=parse_profile(row.profile),
    )


def quarantine(tx: Transaction, unreadable: Mapping[str, str], *, now: float) -> None:
    """Puts jobs whose stored spec today's rules refuse into quarantine: they do not run, and their status says why.

    Each gets one event, unless it is in quarantine for this reason already. The quarantine ends by itself once the row
    can be read.
    """
    for job_id, reason in unreadable.items():
        with edit_job(tx, job_id, now) as edit:
            if (edit.status.reason, edit.status.message) != (QUARANTINED, reason):
                edit.describe(reason=QUARANTINED, message=reason)
                edit.event(JobQuarantined(message=reason))


def begin_attempt(
    tx: Transaction,
    job_id: str,
    *,
    workers: int,
    cluster: str = "",
    reason: str = "",
    flows: Sequence[WorkerFlow] = (),
    now: float,
) -> int:
    """Begins an attempt: QUEUED -> STARTING in this cluster, for the scheduler's `reason`. `flows`: the jobs that give
    workers to it. Returns the number of the attempt.

    Raises JobNotFound; RequestConflict: the job has left the queue.
    """
    assert workers >= 1
    with edit_job(tx, job_id, now) as edit:
        job = edit.job
        standing = step(job.standing, AttemptBegun())
        if standing is None:
            raise (JobEnded if job.state.ended else RequestConflict)(job.id, job.state, "be started")
        attempt = job.attempt + 1
        edit.describe(observed_generation=job.spec_version, generation=0)
        message = reason or f"Starting with {count_text(workers, 'worker')}."
        others = dict(flows) or None
        edit.move(standing, "", message, attempt=attempt, workers=workers, cluster=cluster or None, others=others)
        edit.set(attempt=attempt, pulled_seq=0, granted_workers=workers, cluster=cluster)
        if job.started_at is None:
            edit.set(started_at=now)
    tx.count(MoveKind.START)
    return attempt


def set_grant(
    tx: Transaction, job_id: str, *, workers: int, reason: str, flows: Sequence[WorkerFlow] = (), now: float
) -> None:
    """Grants a job with an attempt a number of workers, with an event if the number changes. `flows`: the jobs that
    give the workers, or get them."""
    with edit_job(tx, job_id, now) as edit:
        before = edit.job.granted_workers
        if edit.job.state in ATTEMPT_STATES and workers != before:
            edit.set(granted_workers=workers)
            edit.event(JobGranted(from_=before, to=workers, reason=reason, **_make_others(flows)))
            tx.count(MoveKind.GROW if workers > before else MoveKind.SHRINK)


def preempt(
    tx: Transaction,
    job_id: str,
    *,
    reason: str,
    beneficiary: str,
    flows: Sequence[WorkerFlow] = (),
    now: float,
) -> None:
    """Takes all workers of a job with an attempt. A grant of 0 workers, with an attempt, stands for it. `beneficiary`:
    the job for which it is preempted; `flows`: those that get the workers.

    Its driver directs the attempt to save and to end. The job returns to the queue with the report of that end
    (`reporting`, which asks `endings.decide_retry`: PREEMPTED is free of charge), or if it is lost, in `requeue`."""
    with edit_job(tx, job_id, now) as edit:
        workers = edit.job.granted_workers
        if edit.job.state in ATTEMPT_STATES and workers:
            edit.set(granted_workers=0)
            edit.event(JobPreempted(workers=workers, beneficiary=beneficiary, reason=reason, **_make_others(flows)))
            tx.count(MoveKind.PREEMPT)


def requeue(tx: Transaction, job_id: str, *, reason: EndReason, message: str, now: float) -> None:
    """Returns a job to the queue, because its attempt, if there is one, is lost. The job is paused or cancelled if a
    user has requested that."""
    with edit_job(tx, job_id, now, is_request=True) as edit:
        job = edit.job
        standing = step(job.standing, Requeued())
        if standing is not None:
            edit.book(goodput.recovering(IncidentCause.CLUSTER_LOST))
            edit.lose(reason, message)
            supervisor_links.end_open(edit, f"the attempt ended: {message}")
            edit.move(standing, reason.value, message, attempt=job.attempt, step=job.status.step)


def note_stay(tx: Transaction, job_id: str, *, cluster: str, reason: str, now: float) -> None:
    """Notes why the attempt stays in its cluster for now, or why a queued job does not start in the cluster that it
    names. The job's status says so until the supervisor reports."""
    with edit_job(tx, job_id, now) as edit:
        if edit.job.state.ended or edit.status.note == reason:
            return
        edit.describe(note=reason)
        if edit.job.state in ATTEMPT_STATES and reason:
            edit.event(JobStaysInCluster(cluster=cluster, reason=reason))


def record_event(tx: Transaction, job_id: str, event: JobEvent, *, now: float) -> None:
    with edit_job(tx, job_id, now) as edit:
        edit.event(event)


def note_driver_failure(tx: Transaction, job_id: str, event: DriverFailed, *, now: float) -> None:
    """Records an unexpected error of the driver. The job's status says so until its supervisor reports."""
    with edit_job(tx, job_id, now) as edit:
        edit.event(event)
        edit.describe(message=event.describe())


def _make_others(flows: Sequence[WorkerFlow]) -> dict[str, Any]:
    return {"others": dict(flows)} if flows else {}
