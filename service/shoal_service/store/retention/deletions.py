"""Deletions of jobs: begun by a mark on the job, continued by whoever finds the mark, complete when the row is gone.

    begin      jobs.deleting, a row of `deletions`         the job cannot begin again
    (the files in the storage: control/retention/)
    remove     rows of the job, a batch in each transaction
    finish     the job's row, and the rest with it          the row of `deletions` stays, as a record

Every step can be repeated, by any process, so a crash between two of them costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, delete, select, update

from shoal_service.core.retention import Kind
from shoal_service.fleet_views import DeletionView
from shoal_service.store.database import upsert
from shoal_service.store.errors import JobNotEnded, JobNotFound
from shoal_service.store.lifecycle import continuing
from shoal_service.store.records import load
from shoal_service.store.retention import rows
from shoal_service.store.tables import deletions, jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionRequest:
    """What is asked for."""

    root: str
    """URL of the job's directory in the storage; empty: it is not known."""
    with_checkpoints: bool = True
    by: str = ""
    """Who asks."""
    reason: str = ""


def begin(connection: Connection, job_id: str, request: DeletionRequest, *, now: float) -> DeletionView:
    """The deletion of a job that has ended; the one that was begun, if there is one. Raises JobNotFound,
    JobNotEnded."""
    known = find(connection, job_id)
    if known is not None:
        return known
    job = load(connection, job_id, lock=True)
    if not job.state.ended:
        raise JobNotEnded(job_id, job.state, "be deleted")
    kept = sorted({*job.pins, *continuing.holders(connection, job_id)})
    row = connection.execute(select(jobs.c.project, jobs.c.user).where(jobs.c.num == job.num)).one()
    view = DeletionView(
        job_id=job_id,
        name=job.name,
        project=row.project,
        user=row.user,
        requested_at=now,
        requested_by=request.by,
        reason=request.reason,
        with_checkpoints=request.with_checkpoints,
        root=request.root,
        kept=tuple(f"{request.root}/{name}" for name in kept) if request.with_checkpoints else (),
    )
    connection.execute(update(jobs).where(jobs.c.num == job.num).values(deleting=True, updated_at=now))
    _save(connection, view)
    return view


def find(connection: Connection, job_id: str) -> DeletionView | None:
    query = select(deletions.c.document).where(deletions.c.job_id == job_id)
    document = connection.execute(query).scalar_one_or_none()
    return None if document is None else DeletionView.model_validate_json(document)


def newest(
    connection: Connection, *, project: str | None, limit: int, visible: Collection[str] | None = None
) -> list[DeletionView]:
    query = select(deletions.c.document).order_by(deletions.c.requested_at.desc()).limit(limit)
    if project is not None:
        query = query.where(deletions.c.project == project)
    if visible is not None:
        query = query.where(deletions.c.project.in_(sorted(visible)))
    return [DeletionView.model_validate_json(document) for document in connection.execute(query).scalars()]


def unfinished(connection: Connection, *, limit: int) -> list[DeletionView]:
    """The oldest first."""
    query = select(deletions.c.document).where(deletions.c.finished_at.is_(None))
    documents = connection.execute(query.order_by(deletions.c.requested_at).limit(limit)).scalars()
    return [DeletionView.model_validate_json(document) for document in documents]


def remove_rows(connection: Connection, job_id: str) -> int:
    """A batch of the job's rows; 0: there are no more."""
    try:
        job = load(connection, job_id, lock=True)
    except JobNotFound:
        return 0
    removed = rows.remove(connection, job.num, Kind.JOB) if job.deleting else 0
    view = find(connection, job_id)
    if removed and view is not None:
        _save(connection, view.model_copy(update={"rows": view.rows + removed}))
    return removed


def finish(connection: Connection, job_id: str, *, now: float) -> DeletionView:
    """The job is gone. Raises JobNotFound: its deletion was never begun."""
    view = find(connection, job_id)
    if view is None:
        raise JobNotFound(job_id)
    connection.execute(delete(jobs).where(jobs.c.id == job_id, jobs.c.deleting))
    if view.finished_at is None:
        view = view.model_copy(update={"finished_at": now, "error": ""})
        _save(connection, view)
    return view


def note_error(connection: Connection, job_id: str, error: str) -> DeletionView:
    """Why it could not be continued. Raises JobNotFound: it was never begun."""
    view = find(connection, job_id)
    if view is None:
        raise JobNotFound(job_id)
    if view.error != error and view.finished_at is None:
        view = view.model_copy(update={"error": error})
        _save(connection, view)
    return view


def _save(connection: Connection, view: DeletionView) -> None:
    row = {
        "job_id": view.job_id,
        "project": view.project,
        "requested_at": view.requested_at,
        "finished_at": view.finished_at,
        "document": view.model_dump_json(),
    }
    upsert(connection, deletions, [row])
