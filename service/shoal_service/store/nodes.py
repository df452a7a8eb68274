"""Drains and probations of nodes, as functions of an open transaction. Called by `Store`.

Rows are keyed by Ray's node id, which is never reused: a machine that returns is a new node without drain or suspicion.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from sqlalchemy import ColumnElement, Connection, delete, select, update

from shoal_service.core.nodes import Drain, DrainSource
from shoal_service.store.database import insert
from shoal_service.store.tables import node_cordons, node_drains, node_suspicions

MAX_REASON_CHARS = 500


_MAX_JOBS = 16
"""Jobs whose evidence against one node is stored; two are enough for probation."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Jobs suspect a node: they place no new worker on it until a test of it passes. `core/nodes.py` decides whether it
    is on probation."""

    node_id: str
    reason: str
    since: float
    job_id: str
    """The job that suspected it last; its history gets an event when the node is cleared."""
    attempt: int
    probation_s: float
    """Value of health.probation_s in the job's spec."""
    next_test_at: float
    num_tests: int
    """Failed tests so far."""
    job_ids: tuple[str, ...]
    """The jobs that suspect it, oldest evidence first."""
    avoided_until: float
    """A test that passes earlier does not clear the node: the job that suspected it avoids it until then."""


def request_drain(
    connection: Connection,
    node_id: str,
    *,
    reason: str,
    deadline: float | None,
    now: float,
    source: DrainSource = DrainSource.API,
) -> None:
    """A repeated request replaces reason and deadline, but not the time of the first request."""
    values = {"reason": reason[:MAX_REASON_CHARS], "deadline": deadline, "source": source.value}
    statement = insert(connection, node_drains).values(node_id=node_id, requested_at=now, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["node_id"], set_=values))


def undo_drain(connection: Connection, node_id: str) -> bool:
    """False: the node was not drained."""
    return connection.execute(delete(node_drains).where(node_drains.c.node_id == node_id)).rowcount > 0


def drains(connection: Connection) -> dict[str, Drain]:
    return {
        row.node_id: Drain(
            reason=row.reason, requested_at=row.requested_at, deadline=row.deadline, source=DrainSource(row.source)
        )
        for row in connection.execute(select(node_drains))
    }


def suspect(connection: Connection, suspicion: Suspicion) -> None:
    """The newest suspicion replaces an older one, and its time starts again; `since` and the jobs are kept."""
    known = suspicions(connection, suspicion.node_id, lock=True).get(suspicion.node_id)
    job_ids = tuple(dict.fromkeys((*(known.job_ids if known else ()), *suspicion.job_ids)))[-_MAX_JOBS:]
    changed = {
        "reason": suspicion.reason[:MAX_REASON_CHARS],
        "job_id": suspicion.job_id,
        "attempt": suspicion.attempt,
        "probation_s": suspicion.probation_s,
        "next_test_at": suspicion.next_test_at,
        "job_ids": json.dumps(job_ids),
        "avoided_until": suspicion.avoided_until,
    }
    statement = insert(connection, node_suspicions).values(
        node_id=suspicion.node_id, since=suspicion.since, num_tests=suspicion.num_tests, **changed
    )
    connection.execute(statement.on_conflict_do_update(index_elements=["node_id"], set_=changed))


def suspicions(connection: Connection, node_id: str | None = None, *, lock: bool = False) -> dict[str, Suspicion]:
    """By node id: all of them, or that of one node."""
    query = select(*_SUSPICION)
    if node_id is not None:
        query = query.where(node_suspicions.c.node_id == node_id)
    if lock:
        query = query.with_for_update()
    found = {}
    for row in connection.execute(query):
        values = row._asdict() | {"job_ids": tuple(json.loads(row.job_ids))}
        found[row.node_id] = Suspicion(**values)
    return found


def postpone_test(connection: Connection, node_id: str, *, reason: str, next_test_at: float) -> None:
    """A test of the node has failed."""
    connection.execute(
        update(node_suspicions)
        .where(node_suspicions.c.node_id == node_id)
        .values(reason=reason[:MAX_REASON_CHARS], next_test_at=next_test_at, num_tests=node_suspicions.c.num_tests + 1)
    )


def repeat_test(connection: Connection, suspicion: Suspicion, *, next_test_at: float) -> None:
    """A test has passed, but the job that suspects the node avoids it for longer."""
    connection.execute(update(node_suspicions).where(*_same(suspicion)).values(next_test_at=next_test_at))


def clear_suspicion(connection: Connection, suspicion: Suspicion) -> bool:
    """False: the node is no longer suspected, or it was suspected again since the test began."""
    return connection.execute(delete(node_suspicions).where(*_same(suspicion))).rowcount > 0


def forget(connection: Connection, node_ids: frozenset[str]) -> None:
    """Deletes the rows of nodes that have left the cluster; Ray never reuses their ids."""
    for table in (node_drains, node_cordons, node_suspicions):
        connection.execute(delete(table).where(table.c.node_id.in_(sorted(node_ids))))


def _same(suspicion: Suspicion) -> tuple[ColumnElement[bool], ...]:
    return (
        node_suspicions.c.node_id == suspicion.node_id,
        node_suspicions.c.num_tests == suspicion.num_tests,
        node_suspicions.c.next_test_at == suspicion.next_test_at,
    )


_SUSPICION = tuple(node_suspicions.c[field.name] for field in fields(Suspicion))
