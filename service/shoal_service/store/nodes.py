"""Drains and probations of nodes, as functions of an open transaction. Called by `Store`.

Rows are keyed by Ray's node id, which is never reused: a machine that returns is a new node without drain or suspicion.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, select, update

from shoal_service.core.nodes import Drain, DrainSource
from shoal_service.store.database import insert
from shoal_service.store.tables import node_drains, node_suspicions

MAX_REASON_CHARS = 500


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A node on probation: no new worker is placed on it until a test of it passes."""

    node_id: str
    reason: str
    since: float
    job_id: str
    """The job that suspected it; its history gets an event when the node is cleared."""
    attempt: int
    probation_s: float
    """That job's health.probation_s."""
    next_test_at: float
    num_tests: int
    """Failed tests so far."""


def request_drain(connection: Connection, node_id: str, *, reason: str, deadline: float | None, now: float) -> None:
    """A repeated request replaces reason and deadline, but not the time of the first request."""
    values = {"reason": reason[:MAX_REASON_CHARS], "deadline": deadline}
    statement = insert(connection, node_drains).values(node_id=node_id, requested_at=now, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["node_id"], set_=values))


def undo_drain(connection: Connection, node_id: str) -> bool:
    """False: the node was not drained."""
    return connection.execute(delete(node_drains).where(node_drains.c.node_id == node_id)).rowcount > 0


def drains(connection: Connection) -> dict[str, Drain]:
    return {
        row.node_id: Drain(
            reason=row.reason, requested_at=row.requested_at, deadline=row.deadline, source=DrainSource.API
        )
        for row in connection.execute(select(node_drains))
    }


def suspect(connection: Connection, suspicion: Suspicion) -> None:
    """The newest suspicion replaces an older one, and the probation starts again; `since` keeps its first value."""
    changed = {
        "reason": suspicion.reason[:MAX_REASON_CHARS],
        "job_id": suspicion.job_id,
        "attempt": suspicion.attempt,
        "probation_s": suspicion.probation_s,
        "next_test_at": suspicion.next_test_at,
    }
    statement = insert(connection, node_suspicions).values(
        node_id=suspicion.node_id, since=suspicion.since, num_tests=suspicion.num_tests, **changed
    )
    connection.execute(statement.on_conflict_do_update(index_elements=["node_id"], set_=changed))


def suspicions(connection: Connection) -> dict[str, Suspicion]:
    return {row.node_id: Suspicion(*row) for row in connection.execute(select(*_SUSPICION))}


def postpone_test(connection: Connection, node_id: str, *, reason: str, next_test_at: float) -> None:
    """A test of the node has failed."""
    connection.execute(
        update(node_suspicions)
        .where(node_suspicions.c.node_id == node_id)
        .values(reason=reason[:MAX_REASON_CHARS], next_test_at=next_test_at, num_tests=node_suspicions.c.num_tests + 1)
    )


def clear_suspicion(connection: Connection, suspicion: Suspicion) -> bool:
    """False: the node is no longer suspected, or it was suspected again since the test began."""
    same = (
        node_suspicions.c.node_id == suspicion.node_id,
        node_suspicions.c.num_tests == suspicion.num_tests,
        node_suspicions.c.next_test_at == suspicion.next_test_at,
    )
    return connection.execute(delete(node_suspicions).where(*same)).rowcount > 0


def forget(connection: Connection, node_ids: frozenset[str]) -> None:
    """Deletes the rows of nodes that have left the cluster; Ray never reuses their ids."""
    for table in (node_drains, node_suspicions):
        connection.execute(delete(table).where(table.c.node_id.in_(sorted(node_ids))))


_SUSPICION = tuple(
    node_suspicions.c[name]
    for name in ("node_id", "reason", "since", "job_id", "attempt", "probation_s", "next_test_at", "num_tests")
)
