"""What the store knows about ended jobs and unused archives, and the removal of parts of a job's history."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import (
    ColumnElement,
    Connection,
    Exists,
    Row,
    Table,
    delete,
    exists,
    func,
    insert,
    select,
    tuple_,
    update,
)

from shoal_service.core.events.job import JobPruned
from shoal_service.core.retention import EndedJob, Kind, best_names
from shoal_service.store.database import json_text
from shoal_service.store.lifecycle import continuing
from shoal_service.store.overview import rollups
from shoal_service.store.records import document_of, load, pins_of, read_status
from shoal_service.store.retention import rows
from shoal_service.store.tables import checkpoints, code_archives, events, job_specs, jobs, logs, series, series_rollups
from shoal_service.views import CheckpointState
from shoal_workers.contract.marker import CheckpointName

_COMMITTED = CheckpointState.COMMITTED.value
Place = tuple[float, int]
"""Where a page of ended jobs begins: the end and the number of the job before."""
BEGINNING: Place = (0.0, 0)


def page(connection: Connection, *, before: float, after: Place, limit: int) -> tuple[list[EndedJob], Place | None]:
    """Jobs that ended before that time, the first ones first; where the next page begins, None: there is none."""
    columns = (
        jobs.c.num,
        jobs.c.id,
        jobs.c.name,
        jobs.c.ended_at,
        jobs.c.pins,
        jobs.c.status,
        _has(logs).label("logs"),
        _has_rolled_steps().label("series"),
        exists(select(1).where(events.c.job_num == jobs.c.num, events.c.type != JobPruned.type)).label("events"),
    )
    query = (
        select(*columns)
        .where(jobs.c.ended_at < before, ~jobs.c.deleting)
        .where(tuple_(jobs.c.ended_at, jobs.c.num) > after)
        .order_by(jobs.c.ended_at, jobs.c.num)
        .limit(limit)
    )
    found = connection.execute(query).all()
    stored = _checkpoints(connection, [row.num for row in found])
    needed = continuing.held(connection)
    ended = [_ended(row, stored.get(row.num, []), needed.get(row.id, ())) for row in found]
    return ended, ((found[-1].ended_at, found[-1].num) if len(found) == limit else None)


def remove_part(connection: Connection, job_id: str, kind: Kind, *, reason: str, before: int, now: float) -> int:
    """A batch of the job's rows of this kind; 0: there are no more, and an event says so. `before`: how many rows the
    batches before have removed. Raises JobNotFound."""
    job = load(connection, job_id, lock=True)
    removed = 0 if not job.state.ended else rows.remove(connection, job.num, kind)
    if removed == 0 and before > 0:
        event = JobPruned(what=kind.value, rows=before, reason=reason)
        # Not by JobEdit, which writes a line into the log for each event: the log would never stay empty.
        row = {"job_num": job.num, "seq": job.event_seq + 1, "at": now, "type": event.type}
        connection.execute(insert(events), row | {"data": document_of(event.data())})
        values = {"event_seq": job.event_seq + 1, "updated_at": now}
        connection.execute(update(jobs).where(jobs.c.num == job.num).values(values))
    return removed


def unused_archives(connection: Connection, *, before: float, limit: int) -> list[str]:
    """Archives that were last uploaded before that time and that the spec of no job names."""
    old = select(code_archives.c.sha256).where(code_archives.c.stored_at < before, _is_unused(connection))
    return list(connection.execute(old.order_by(code_archives.c.stored_at).limit(limit)).scalars())


def remove_archive(connection: Connection, sha256: str, *, before: float) -> bool:
    """False: it is used now, or was uploaded again."""
    chosen = (code_archives.c.sha256 == sha256, code_archives.c.stored_at < before, _is_unused(connection))
    return connection.execute(delete(code_archives).where(*chosen)).rowcount > 0


def _is_unused(connection: Connection) -> ColumnElement[bool]:
    named = json_text(connection, job_specs.c.document, "code", "archive")
    return code_archives.c.sha256.not_in(select(named).where(named.is_not(None)))


def _has(table: Table) -> Exists:
    return exists(select(1).where(table.c.job_num == jobs.c.num))


def _has_rolled_steps() -> Exists:
    """Steps that are in a roll-up of the finest level too; see `rows.remove`."""
    finest = (series_rollups.c.job_num == jobs.c.num) & (series_rollups.c.width == min(rollups.WIDTHS))
    newest = select(func.max(series_rollups.c.step)).where(finest).correlate(jobs).scalar_subquery()
    return exists(select(1).where(series.c.job_num == jobs.c.num, series.c.step <= newest))


def _checkpoints(connection: Connection, nums: Sequence[int]) -> dict[int, list[tuple[CheckpointName, str]]]:
    states = (CheckpointState.COMMITTED.value, CheckpointState.DAMAGED.value)
    query = select(checkpoints).where(checkpoints.c.job_num.in_(nums), checkpoints.c.state.in_(states))
    found: dict[int, list[tuple[CheckpointName, str]]] = {}
    for row in connection.execute(query):
        name = CheckpointName(row.step, row.attempt, row.generation)
        found.setdefault(row.job_num, []).append((name, row.state))
    return found


def _ended(
    row: Row[*tuple[object, ...]], stored: Sequence[tuple[CheckpointName, str]], needed: Sequence[str]
) -> EndedJob:
    """`needed`: the checkpoints that other jobs go on from. Those of the best validations stay too."""
    pinned = (CheckpointName.parse(name) for name in (*pins_of(row.pins), *needed))
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
