"""The audit: who changed what through the API, and from where. Rows are inserted, never changed, and deleted
only when they are old, which is a row itself.

The deed of a request is in a context variable: the HTTP edge sets it, and the first transaction that writes in the
request's context (`Store.write`) inserts the row. So a change and its record are committed together, and no caller
can forget it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row, delete, func, insert, select

from shoal_service.access_views import AuditEvent
from shoal_service.core.access import Principal
from shoal_service.store.database import Transaction
from shoal_service.store.tables import audit

DONE = "done"
_MAX_PATH = 500
_BATCH = 5_000


@dataclass(slots=True)
class Deed:
    """A request that may change something. Used by one request at a time."""

    at: float
    address: str
    operation: str
    path: str
    actor: str = ""
    role: str = ""
    token_id: str = ""
    job_id: str = ""
    is_recorded: bool = False

    def by(self, principal: Principal) -> None:
        self.actor, self.role, self.token_id = principal.name, principal.role.value, principal.token_id


CURRENT: ContextVar[Deed | None] = ContextVar("deed", default=None)
"""The deed that is under way; None means no request of the API, but the service itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """Selects events of the audit; None means all."""

    before: int | None = None
    job_id: str | None = None
    actor: str | None = None
    limit: int = 100


def record(tx: Transaction, deed: Deed, outcome: str = DONE) -> None:
    row = {
        "at": deed.at,
        "actor": deed.actor,
        "role": deed.role,
        "token_id": deed.token_id,
        "address": deed.address,
        "operation": deed.operation,
        "path": deed.path[:_MAX_PATH],
        "job_id": deed.job_id,
        "outcome": outcome,
    }
    tx.execute(insert(audit), row)


def record_refusal(tx: Transaction, deed: Deed, outcome: str) -> None:
    """Records the code of a request that changed no row, or was refused. `Store.write` then adds no record of its
    own."""
    deed.is_recorded = True
    record(tx, deed, outcome)


@contextmanager
def preparing() -> Iterator[None]:
    """What is written within this block only prepares what the request asks for: it is not recorded."""
    token = CURRENT.set(None)
    try:
        yield
    finally:
        CURRENT.reset(token)


def about(job_id: str) -> None:
    """Notes that the request that is served has made this job."""
    deed = CURRENT.get()
    if deed is not None:
        deed.job_id = job_id


def made(path: str) -> None:
    """Notes that the request that is served has made this resource, which is no job."""
    deed = CURRENT.get()
    if deed is not None:
        deed.job_id, deed.path = "", path


def by() -> dict[str, Any]:
    """The field `by` of an event: the principal that makes the request that is served, if there is one."""
    deed = CURRENT.get()
    return {"by": deed.actor} if deed is not None and deed.actor else {}


def read(tx: Transaction, query: AuditQuery) -> list[AuditEvent]:
    """Reads the audit, newest first."""
    rows = select(audit).order_by(audit.c.num.desc()).limit(query.limit)
    if query.before is not None:
        rows = rows.where(audit.c.num < query.before)
    if query.job_id is not None:
        rows = rows.where(audit.c.job_id == query.job_id)
    if query.actor is not None:
        rows = rows.where(audit.c.actor == query.actor)
    return [_event(row) for row in tx.execute(rows)]


def count_before(tx: Transaction, before: float) -> int:
    return int(tx.execute(select(func.count()).where(audit.c.at < before)).scalar_one())


def remove_before(tx: Transaction, before: float, *, reason: str, now: float) -> int:
    """Deletes a batch of the oldest records. That they are deleted is a record itself, of the same transaction."""
    oldest = select(audit.c.num).where(audit.c.at < before).order_by(audit.c.num).limit(_BATCH)
    nums = list(tx.execute(oldest).scalars())
    if not nums:
        return 0
    tx.execute(delete(audit).where(audit.c.num.in_(nums)))
    until = datetime.fromtimestamp(before, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    deed = Deed(at=now, address="", operation="retention of the audit", path="", actor="retention")
    deed.path = f"{len(nums)} records before {until} deleted: {reason}"
    record(tx, deed)
    return len(nums)


def _event(row: Row[*tuple[object, ...]]) -> AuditEvent:
    known = dict(row._mapping)
    return AuditEvent(number=known.pop("num"), **known)
