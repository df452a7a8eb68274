"""What users and jobs have said of single nodes: drains, cordons and suspicions.

Rows are keyed by Ray's node id, which is never reused: a machine that returns is a new node without drain or suspicion.
The jobs with workers on a node get an event about its cordon.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, fields

from sqlalchemy import ColumnElement, Table, delete, select, update

from shoal_service.core.events import JobEvent, NodeCleared, NodeCordoned
from shoal_service.core.nodes import Cordon, Drain, DrainSource, NodeSuspicion
from shoal_service.store import driving
from shoal_service.store.database import (
    Transaction,
    in_states,
    insert_on_conflict,
    jobs,
    node_cordons,
    node_drains,
    node_suspicions,
    upsert,
)
from shoal_service.store.records import parse_workers
from shoal_workers.contract import JobState

MAX_REASON_CHARS = 500
_MAX_JOBS = 16
"""Jobs whose evidence against one node is stored; two are enough for probation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion(NodeSuspicion):
    """A suspicion of jobs against a node. They place no new worker on it until a test of it passes.

    `core/nodes.py` decides whether the node is on probation. `job_ids` has the oldest evidence first.
    """

    node_id: str
    job_id: str
    """The job that suspected it last; its history gets an event when the node is cleared."""
    attempt: int
    probation_s: float
    """Value of health.probation_s in the job's spec."""
    avoided_until: float
    """The job that suspected the node avoids it until then, also if a test passes earlier."""


def request_drain(
    tx: Transaction,
    node_id: str,
    *,
    reason: str,
    deadline: float | None,
    now: float,
    source: DrainSource = DrainSource.API,
) -> None:
    """Asks jobs to leave the node; the caller checks that it exists. A repeated request replaces reason and deadline,
    but not the time of the first request."""
    values = {"reason": reason[:MAX_REASON_CHARS], "deadline": deadline, "source": source.value}
    statement = insert_on_conflict(tx, node_drains).values(node_id=node_id, requested_at=now, **values)
    tx.execute(statement.on_conflict_do_update(index_elements=["node_id"], set_=values))
    tx.publish(f"node {node_id}", is_request=True)


def undo_drain(tx: Transaction, node_id: str) -> bool:
    """Undoes `request_drain`. False: the node was not drained."""
    return _undo(tx, node_drains, node_id)


def _undo(tx: Transaction, table: Table, node_id: str) -> bool:
    undone = tx.execute(delete(table).where(table.c.node_id == node_id)).rowcount > 0
    if undone:
        tx.publish(f"node {node_id}", is_request=True)
    return undone


def drains(tx: Transaction) -> dict[str, Drain]:
    return {
        row.node_id: Drain(
            reason=row.reason, requested_at=row.requested_at, deadline=row.deadline, source=DrainSource(row.source)
        )
        for row in tx.execute(select(node_drains))
    }


def suspect(tx: Transaction, suspicion: Suspicion) -> None:
    """Stores a suspicion. It replaces an older one, and its time starts again; `since` and the jobs are kept."""
    known = suspicions(tx, suspicion.node_id, lock=True).get(suspicion.node_id)
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
    statement = insert_on_conflict(tx, node_suspicions).values(
        node_id=suspicion.node_id, since=suspicion.since, num_tests=suspicion.num_tests, **changed
    )
    tx.execute(statement.on_conflict_do_update(index_elements=["node_id"], set_=changed))


def suspicions(tx: Transaction, node_id: str | None = None, *, lock: bool = False) -> dict[str, Suspicion]:
    """Reads suspicions by node id: all of them, or that of one node."""
    query = select(*_SUSPICION)
    if node_id is not None:
        query = query.where(node_suspicions.c.node_id == node_id)
    if lock:
        query = query.with_for_update()
    return {
        row.node_id: Suspicion(**row._asdict() | {"job_ids": tuple(json.loads(row.job_ids))})
        for row in tx.execute(query)
    }


def postpone_test(tx: Transaction, node_id: str, *, reason: str, next_test_at: float) -> None:
    """Postpones the next test, because a test of the node has failed."""
    tx.execute(
        update(node_suspicions)
        .where(node_suspicions.c.node_id == node_id)
        .values(reason=reason[:MAX_REASON_CHARS], next_test_at=next_test_at, num_tests=node_suspicions.c.num_tests + 1)
    )


def repeat_test(tx: Transaction, suspicion: Suspicion, *, next_test_at: float) -> None:
    """Plans one more test: one has passed, but the job that suspects the node avoids it for longer."""
    tx.execute(update(node_suspicions).where(*_match_suspicion(suspicion)).values(next_test_at=next_test_at))


def clear_suspicion(tx: Transaction, suspicion: Suspicion, *, now: float) -> bool:
    """Clears a node that has passed its test; the job that suspected it gets an event. False: the node is no longer
    suspected, or was suspected again since the test began."""
    if not tx.execute(delete(node_suspicions).where(*_match_suspicion(suspicion))).rowcount:
        return False
    suspected_s = now - suspicion.since
    event = NodeCleared(node_id=suspicion.node_id, suspected_s=suspected_s, reason=suspicion.reason)
    driving.record_event(tx, suspicion.job_id, event, now=now)
    return True


def forget(tx: Transaction, node_ids: frozenset[str]) -> None:
    """Deletes the rows of nodes that have left the cluster; Ray never reuses their ids."""
    for table in (node_drains, node_cordons, node_suspicions):
        tx.execute(delete(table).where(table.c.node_id.in_(sorted(node_ids))))


def cordon(tx: Transaction, node_id: str, *, reason: str, now: float) -> None:
    """Cordons a node: no new worker is placed on it. The caller checks that it exists. A repeated request replaces the
    reason."""
    upsert(tx, node_cordons, [{"node_id": node_id, "reason": reason, "requested_at": now}])
    _record_on_nodes(tx, {node_id}, NodeCordoned(node_id=node_id, reason=reason), now)
    tx.publish(f"node {node_id}", is_request=True)


def uncordon(tx: Transaction, node_id: str) -> bool:
    """Undoes `cordon`. False: the node was not cordoned."""
    return _undo(tx, node_cordons, node_id)


def cordons(tx: Transaction) -> dict[str, Cordon]:
    """Cordons by node id."""
    rows = tx.execute(select(node_cordons))
    return {row.node_id: Cordon(reason=row.reason, requested_at=row.requested_at) for row in rows}


def _record_on_nodes(tx: Transaction, nodes: Collection[str], event: JobEvent, now: float) -> None:
    """Records an event in the jobs with workers on these nodes, which are ids or addresses."""
    query = select(jobs.c.id, jobs.c.workers).where(
        in_states(state for state in JobState if not state.ended), jobs.c.workers != "[]"
    )
    for job_id, document in tx.execute(query).all():
        if any(worker.node_id in nodes or worker.node_ip in nodes for worker in parse_workers(document)):
            driving.record_event(tx, job_id, event, now=now)


def _match_suspicion(suspicion: Suspicion) -> tuple[ColumnElement[bool], ...]:
    return (
        node_suspicions.c.node_id == suspicion.node_id,
        node_suspicions.c.num_tests == suspicion.num_tests,
        node_suspicions.c.next_test_at == suspicion.next_test_at,
    )


_SUSPICION = tuple(node_suspicions.c[field.name] for field in fields(Suspicion))
