"""Deletes the rows of a job in bounded transactions: a long history must not keep the database from other writers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Connection, Table, delete, func, select

from shoal_service.core.events.job import JobPruned
from shoal_service.core.retention import Kind
from shoal_service.store.overview import rollups
from shoal_service.store.tables import events, logs, series, series_rollups

BATCH_ROWS = 5_000
"""Deleted in one transaction, about 20 ms of SQLite's lock."""
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


def remove(connection: Connection, job_num: int, kind: Kind, *, limit: int = BATCH_ROWS) -> int:
    """Deletes the oldest rows; how many. 0: none are left.

    Unless the job goes as a whole, events that tell of deletions stay, and of the series the steps that are in no
    roll-up: the last ones, seven at most.
    """
    for table, key in _KEYS[kind]:
        chosen = [table.c.job_num == job_num]
        if kind is Kind.SERIES:
            chosen.append(key <= rollups.rolled_until(connection, job_num))
        if kind is Kind.EVENTS:
            chosen.append(events.c.type != JobPruned.type)
        oldest = select(key).where(*chosen).order_by(key).limit(limit).subquery()
        last = connection.execute(select(func.max(oldest.c[0]))).scalar_one()
        if last is not None:
            return connection.execute(delete(table).where(*chosen, key <= last)).rowcount
    return 0
