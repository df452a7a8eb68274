"""Deletion of jobs, and of what ended jobs leave behind, in bounded transactions.

    begin      jobs.deleting, a row of `deletions`         the job cannot begin again
    (the files in the storage: control/retention/)
    remove     rows of the job, a batch in each transaction
    finish     the job's row, and the rest with it          the row of `deletions` stays, as a record

Every step can be repeated, by any process, so a crash between two of them costs nothing, and none needs the lease. A
long history must not keep the database from other writers, so its rows go in batches. The storage is never touched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Exists, Row, Table, delete, exists, func, insert, select, tuple_, update

from shoal_service.core.events import JobPruned
from shoal_service.core.retention import EndedJob, Kind, best_names
from shoal_service.fleet_views import DeletionView
from shoal_service.store import checkpoint_rows, curves, island_rounds
from shoal_service.store.curves import FACTOR
from shoal_service.store.database import (
    Transaction,
    checkpoints,
    deletions,
    events,
    in_projects,
    jobs,
    logs,
    series,
    series_rollups,
    upsert,
)
from shoal_service.store.errors import IslandsNotEnded, JobNotEnded, JobNotFound
from shoal_service.store.records import dump_data, load, load_spec, parse_pins, read_status
from shoal_service.views import CheckpointState
from shoal_workers.contract import CheckpointName


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionRequest:
    """A request to delete a job."""

    root: str
    """URL of the job's directory in the storage; empty: it is not known."""
    with_checkpoints: bool = True
    by: str = ""
    """The principal that asks."""
    reason: str = ""


def begin(tx: Transaction, job_id: str, request: DeletionRequest, *, now: float) -> DeletionView:
    """Begins the deletion of a job, which has ended and cannot begin again; `remove_rows` and `finish` complete it.
    Returns the deletion that was begun before, if there is one. Raises JobNotFound, JobNotEnded, IslandsNotEnded."""
    tx.publish(job_id)
    known = find(tx, job_id)
    if known is not None:
        return known
    job = load(tx, job_id, lock=True)
    if not job.state.ended:
        raise JobNotEnded(job_id, job.state, "be deleted")
    if others := island_rounds.find_training(tx, job_id):
        raise IslandsNotEnded(job_id, others)
    holders = checkpoint_rows.holders(tx, job_id)
    is_held = checkpoint_rows.FILES in holders
    needed = {*job.pins, *holders, *checkpoint_rows.registered(tx, job_id)}  # by users, other jobs, or the registry
    names = sorted(needed - {checkpoint_rows.FILES})
    kept = [f"{request.root}/{name}" for name in names] + ([request.root] if is_held else [])
    is_script = load_spec(tx, job.num, job.spec_version).script is not None
    view = DeletionView(
        job_id=job_id,
        name=job.name,
        project=job.project,
        user=job.user,
        requested_at=now,
        requested_by=request.by,
        reason=request.reason,
        with_checkpoints=request.with_checkpoints,
        root=request.root,
        with_files=request.with_checkpoints and is_script and not is_held,
        kept=tuple(kept) if request.with_checkpoints else (),
    )
    tx.execute(update(jobs).where(jobs.c.num == job.num).values(deleting=True, updated_at=now))
    _save(tx, view)
    return view


def find(tx: Transaction, job_id: str) -> DeletionView | None:
    query = select(deletions.c.document).where(deletions.c.job_id == job_id)
    document = tx.execute(query).scalar_one_or_none()
    return None if document is None else DeletionView.model_validate_json(document)


def find_project(tx: Transaction, job_id: str) -> str:
    """Find the project of a job, also of a deleted one while its deletion is listed. Raises JobNotFound."""
    project = tx.execute(select(jobs.c.project).where(jobs.c.id == job_id)).scalar_one_or_none()
    if project is None:
        gone = select(deletions.c.project).where(deletions.c.job_id == job_id)
        project = tx.execute(gone).scalar_one_or_none()
    if project is None:
        raise JobNotFound(job_id)
    return str(project)


def read_newest(
    tx: Transaction, *, project: str | None = None, limit: int = 100, visible: Collection[str] | None = None
) -> list[DeletionView]:
    """Read the newest deletions. `visible`: only of jobs of these projects."""
    query = select(deletions.c.document).where(in_projects(deletions.c.project, visible, project))
    newest_first = query.order_by(deletions.c.requested_at.desc()).limit(limit)
    return [DeletionView.model_validate_json(document) for document in tx.execute(newest_first).scalars()]


def read_unfinished(tx: Transaction, *, limit: int = 100) -> list[DeletionView]:
    """Read the deletions that are not completed, the oldest first."""
    query = select(deletions.c.document).where(deletions.c.finished_at.is_(None))
    documents = tx.execute(query.order_by(deletions.c.requested_at).limit(limit)).scalars()
    return [DeletionView.model_validate_json(document) for document in documents]


def remove_rows(tx: Transaction, job_id: str) -> int:
    """Deletes a batch of the job's rows. 0: there are no more."""
    try:
        job = load(tx, job_id, lock=True)
    except JobNotFound:
        return 0
    removed = remove_batch(tx, job.num, Kind.JOB) if job.deleting else 0
    view = find(tx, job_id)
    if removed and view is not None:
        _save(tx, view.model_copy(update={"rows": view.rows + removed}))
    return removed


def finish(tx: Transaction, job_id: str, *, now: float) -> DeletionView:
    """Deletes the job's row. Raises JobNotFound: its deletion was never begun."""
    view = find(tx, job_id)
    if view is None:
        raise JobNotFound(job_id)
    tx.execute(delete(jobs).where(jobs.c.id == job_id, jobs.c.deleting))
    if view.finished_at is None:
        view = view.model_copy(update={"finished_at": now, "error": ""})
        _save(tx, view)
    tx.publish(job_id)
    return view


def note_error(tx: Transaction, job_id: str, error: str) -> DeletionView:
    """Notes why the deletion could not be continued. Raises JobNotFound: it was never begun."""
    view = find(tx, job_id)
    if view is None:
        raise JobNotFound(job_id)
    if view.error != error and view.finished_at is None:
        view = view.model_copy(update={"error": error})
        _save(tx, view)
    return view


def _save(tx: Transaction, view: DeletionView) -> None:
    row = {
        "job_id": view.job_id,
        "project": view.project,
        "requested_at": view.requested_at,
        "finished_at": view.finished_at,
        "document": view.model_dump_json(),
    }
    upsert(tx, deletions, [row])


BATCH_ROWS = 5_000
"""Rows that one transaction deletes, which takes about 20 ms of SQLite's lock."""
_KEYS: dict[str, tuple[tuple[Table, Column[Any]], ...]] = {
    Kind.LOGS: ((logs, logs.c.seq),),
    Kind.SERIES: ((series, series.c.step),),
    Kind.EVENTS: ((events, events.c.seq),),
    Kind.JOB: (
        (logs, logs.c.seq),
        (series, series.c.step),
        (series_rollups, series_rollups.c.step),
        (events, events.c.seq),
    ),
}


def remove_batch(tx: Transaction, job_num: int, kind: Kind, *, limit: int = BATCH_ROWS) -> int:
    """Deletes the oldest rows, and returns their number. 0: none are left.

    Unless the job goes as a whole, events that tell of deletions stay, and of the series the steps that are in no
    roll-up: the last ones, seven at most.
    """
    for table, key in _KEYS[kind]:
        chosen = [table.c.job_num == job_num]
        if kind is Kind.SERIES:
            chosen.append(key <= curves.rolled_until(tx, job_num))
        if kind is Kind.EVENTS:
            chosen.append(events.c.type != JobPruned.type)
        oldest = select(key).where(*chosen).order_by(key).limit(limit).subquery()
        last = tx.execute(select(func.max(oldest.c[0]))).scalar_one()
        if last is not None:
            return tx.execute(delete(table).where(*chosen, key <= last)).rowcount
    return 0


_COMMITTED = CheckpointState.COMMITTED.value
Place = tuple[float, int]
"""Where a page of ended jobs begins: the end and the number of the job before."""
BEGINNING: Place = (0.0, 0)


def find_ended_jobs(
    tx: Transaction, *, before: float, after: Place = BEGINNING, limit: int = 200
) -> tuple[list[EndedJob], Place | None]:
    """Return jobs that ended before that time, oldest end first, and where the next page begins; None if nowhere."""
    columns = (
        jobs.c.num,
        jobs.c.id,
        jobs.c.name,
        jobs.c.ended_at,
        jobs.c.pins,
        jobs.c.status,
        exists(select(1).where(logs.c.job_num == jobs.c.num)).label("logs"),
        _exist_rolled_steps().label("series"),
        exists(select(1).where(events.c.job_num == jobs.c.num, events.c.type != JobPruned.type)).label("events"),
    )
    query = (
        select(*columns)
        .where(jobs.c.ended_at < before, ~jobs.c.deleting)
        .where(tuple_(jobs.c.ended_at, jobs.c.num) > after)
        .order_by(jobs.c.ended_at, jobs.c.num)
        .limit(limit)
    )
    rows = tx.execute(query).all()
    stored = _read_checkpoints(tx, [row.num for row in rows])
    needed = checkpoint_rows.held(tx)
    ended = [_make_ended_job(row, stored.get(row.num, []), needed.get(row.id, ())) for row in rows]
    return ended, ((rows[-1].ended_at, rows[-1].num) if len(rows) == limit else None)


def remove_part(tx: Transaction, job_id: str, kind: Kind, *, reason: str, before: int, now: float) -> int:
    """Deletes a batch of the job's rows of this kind. 0: there are no more, and an event says so. `before`: how many
    rows the batches before have removed. Raises JobNotFound."""
    job = load(tx, job_id, lock=True)
    removed = 0 if not job.state.ended else remove_batch(tx, job.num, kind)
    if removed == 0 and before > 0:
        event = JobPruned(what=kind.value, rows=before, reason=reason)
        # Not by JobEdit, which writes a line into the log for each event: the log would never stay empty.
        row = {"job_num": job.num, "seq": job.event_seq + 1, "at": now, "type": event.type}
        tx.execute(insert(events), row | {"data": dump_data(event.data())})
        values = {"event_seq": job.event_seq + 1, "updated_at": now}
        tx.execute(update(jobs).where(jobs.c.num == job.num).values(values))
    tx.publish(job_id)
    return removed


def _exist_rolled_steps() -> Exists:
    """Return whether steps are in a roll-up of the finest level too; see `remove_batch`."""
    finest = (series_rollups.c.job_num == jobs.c.num) & (series_rollups.c.width == FACTOR)
    newest = select(func.max(series_rollups.c.step)).where(finest).correlate(jobs).scalar_subquery()
    return exists(select(1).where(series.c.job_num == jobs.c.num, series.c.step <= newest))


def _read_checkpoints(tx: Transaction, nums: Sequence[int]) -> dict[int, list[tuple[CheckpointName, str]]]:
    states = (CheckpointState.COMMITTED.value, CheckpointState.DAMAGED.value)
    query = select(checkpoints).where(checkpoints.c.job_num.in_(nums), checkpoints.c.state.in_(states))
    by_job: dict[int, list[tuple[CheckpointName, str]]] = {}
    for row in tx.execute(query):
        name = CheckpointName(row.step, row.attempt, row.generation)
        by_job.setdefault(row.job_num, []).append((name, row.state))
    return by_job


def _make_ended_job(
    row: Row[*tuple[object, ...]], stored: Sequence[tuple[CheckpointName, str]], needed: Sequence[str]
) -> EndedJob:
    """`needed`: the checkpoints that other jobs go on from. Those of the best validations stay too."""
    pinned = (CheckpointName.parse(name) for name in (*parse_pins(row.pins), *needed))
    standing, committed = read_status(str(row.status)).best, [name for name, state in stored if state == _COMMITTED]
    best = best_names(committed, (), standing.kept_steps) if standing is not None else frozenset()
    return EndedJob(
        id=row.id,
        name=row.name,
        ended_at=row.ended_at,
        has=frozenset(kind for kind in (Kind.LOGS, Kind.SERIES, Kind.EVENTS) if getattr(row, kind.value)),
        committed=tuple(committed),
        damaged=tuple(name for name, state in stored if state == CheckpointState.DAMAGED.value),
        kept=best | {name for name in pinned if name is not None},
        is_needed=bool(needed),
    )
