"""API tokens and sessions of the page: made, found by what a request shows, listed, ended.

Of tokens and cookies only the SHA-256 is stored. A token that has expired or is revoked stays in the table, so that the
audit's ids keep their names. A session that a token began is valid as long as the token is; one of a JWT carries its
principal. A token that a token made is valid as long as that one is, whatever its own row says.

The audit: who changed what through the API, and from where. Rows are inserted, never changed, and deleted
only when they are old, which is a row itself.

The entry of a request is in a context variable: the HTTP edge sets it, and the first transaction that writes in the
request's context (`Store.write`) inserts the row. So a change and its record are committed together, and no caller
can forget it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, Row, bindparam, delete, func, insert, or_, select, update

from shoal_service.access_views import AuditEvent, NewToken, TokenRequest, TokenView
from shoal_service.core.access import (
    Principal,
    Refusal,
    Role,
    decide_grant,
    hash_secret,
    is_own,
    new_token,
    parse_token_id,
)
from shoal_service.store.database import Transaction, audit, insert_on_conflict, sessions, tokens
from shoal_service.store.errors import TokenNotFound
from shoal_service.store.records import columns_for


def create_token(
    tx: Transaction, request: TokenRequest, *, by: str, now: float, cluster: str | None = None
) -> NewToken:
    """Makes a token. Only this answer has it. `by`: name of the principal that makes it; `cluster`: whose gateway shows
    it."""
    return _insert(tx, _make_requested_principal(request, now, cluster), by=by, now=now)


def create_own_token(tx: Transaction, request: TokenRequest, principal: Principal, *, now: float) -> NewToken | Refusal:
    """Makes a token that a person asks for, with no more rights than the person's. Only this answer has it."""
    with_jwt = tokens.c.parent.is_(None) & (tokens.c.created_by == principal.name)
    made_by = tokens.c.parent == principal.token_id if principal.token_id else with_jwt
    is_valid = (tokens.c.revoked_at.is_(None), or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > now))
    num_valid = tx.execute(select(func.count()).select_from(tokens).where(made_by, *is_valid)).scalar_one()
    wish = replace(_make_requested_principal(request, now), user=request.user or "")
    grant = decide_grant(principal, wish, num_valid)
    return grant if isinstance(grant, Refusal) else _insert(tx, grant, by=principal.name, now=now)


def adopt_token(
    tx: Transaction, token: str, request: TokenRequest, *, by: str, now: float, cluster: str | None = None
) -> TokenView:
    """Stores a token that exists already, in a file which several servers may read.

    If its id is known, nothing changes, a revoked one stays revoked, and the answer says whose it is.
    """
    row = _make_token_row(token, _make_requested_principal(request, now, cluster), by=by, now=now)
    # No index is named: servers that insert the same token at once may meet at that of the hash first.
    tx.execute(insert_on_conflict(tx, tokens).values(row).on_conflict_do_nothing())
    return get_token(tx, row["id"])


def _make_requested_principal(request: TokenRequest, now: float, cluster: str | None = None) -> Principal:
    """Whom the token stands for. Jobs of an admin's have the user that their spec names."""
    return Principal(
        name=request.name,
        role=request.role,
        projects=None if request.projects is None else frozenset(request.projects),
        user=request.user or ("" if request.role is Role.ADMIN else request.name),
        expires_at=None if request.expires_in_s is None else now + request.expires_in_s,
        cluster=cluster or "",
        personal=request.personal,
    )


def _insert(tx: Transaction, principal: Principal, *, by: str, now: float) -> NewToken:
    made = new_token()
    row = _make_token_row(made, principal, by=by, now=now)
    tx.execute(insert(tokens), row)
    return NewToken(token=made, **dict(get_token(tx, row["id"])))


def _make_token_row(token: str, principal: Principal, *, by: str, now: float) -> dict[str, Any]:
    token_id = parse_token_id(token)
    assert token_id is not None, "not a token"
    return {
        "id": token_id,
        "hash": hash_secret(token),
        "name": principal.name,
        "role": principal.role.value,
        "projects": None if principal.projects is None else json.dumps(sorted(principal.projects)),
        "user": principal.user,
        "created_at": now,
        "created_by": by,
        "expires_at": principal.expires_at,
        "cluster": principal.cluster or None,
        "parent": principal.parent or None,
        "personal": principal.personal,
    }


def find_principal_by_token(tx: Transaction, token: str, *, now: float) -> Principal | None:
    """Find the principal of a token; None if the token is not valid."""
    return _find_valid_principal(tx, tokens.c.hash == hash_secret(token), now)


def find_principal_by_id(tx: Transaction, token_id: str, *, now: float) -> Principal | None:
    """Find the principal of the token with this id; None if the token is not valid."""
    return _find_valid_principal(tx, tokens.c.id == token_id, now)


def _find_valid_principal(tx: Transaction, condition: ColumnElement[bool], now: float) -> Principal | None:
    row = tx.execute(select(tokens).where(condition)).one_or_none()
    return None if row is None or not _is_valid(tx, row, now) else _make_principal(row)


def list_tokens(tx: Transaction) -> list[TokenView]:
    """List all tokens, newest first, with those that have ended."""
    query = select(tokens).order_by(tokens.c.created_at.desc(), tokens.c.id)
    return [_make_token_view(row) for row in tx.execute(query)]


def list_own_tokens(tx: Transaction, principal: Principal) -> list[TokenView]:
    """Those that the principal may see and revoke, newest first, with those that have ended."""
    ids = (tokens.c.id == principal.token_id, tokens.c.parent == principal.token_id) if principal.token_id else ()
    named = (tokens.c.user == principal.user,) if principal.user else ()
    query = select(tokens).where(tokens.c.cluster.is_(None), or_(False, *ids, *named))
    rows = tx.execute(query.order_by(tokens.c.created_at.desc(), tokens.c.id))
    return [_make_token_view(row) for row in rows if is_own(principal, _make_principal(row))]


def get_token(tx: Transaction, token_id: str) -> TokenView:
    """Read a token. Raises TokenNotFound."""
    return _make_token_view(tx.require_row(select(tokens).where(tokens.c.id == token_id), TokenNotFound(token_id)))


def revoke_own_token(tx: Transaction, token_id: str, principal: Principal, *, now: float) -> TokenView:
    """Revoke a token of the principal. Idempotent. Raises TokenNotFound, also if it is another's."""
    row = tx.execute(select(tokens).where(tokens.c.id == token_id, tokens.c.cluster.is_(None))).one_or_none()
    if row is None or not is_own(principal, _make_principal(row)):
        raise TokenNotFound(token_id)
    return revoke_token(tx, token_id, now=now)


def revoke_token(tx: Transaction, token_id: str, *, now: float) -> TokenView:
    """Revoke a token, and those that were made with it. Idempotent. Raises TokenNotFound."""
    still = (or_(tokens.c.id == token_id, tokens.c.parent == token_id), tokens.c.revoked_at.is_(None))
    tx.execute(update(tokens).where(*still).values(revoked_at=now))
    return get_token(tx, token_id)


def is_revoked(tx: Transaction, token_id: str) -> bool:
    """Return whether the token is revoked. False: it is valid, has expired, or there is none."""
    query = select(tokens.c.revoked_at).where(tokens.c.id == token_id)
    return tx.execute(query).scalar_one_or_none() is not None


def note_use(tx: Transaction, used: Mapping[str, float]) -> None:
    """Note when tokens were used last, by id."""
    newer = or_(tokens.c.last_used_at.is_(None), tokens.c.last_used_at < bindparam("at"))
    statement = update(tokens).where(tokens.c.id == bindparam("token"), newer).values(last_used_at=bindparam("at"))
    tx.execute(statement, [{"token": token_id, "at": at} for token_id, at in used.items()])


def _make_principal(row: Row[Any]) -> Principal:
    return Principal(
        name=row.name,
        role=Role(row.role),
        projects=None if row.projects is None else frozenset(json.loads(row.projects)),
        user=row.user,
        token_id=row.id,
        expires_at=row.expires_at,
        cluster=row.cluster or "",
        parent=row.parent or "",
        personal=row.personal,
    )


def _is_valid(tx: Transaction, row: Row[Any], now: float) -> bool:
    if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
        return False
    if row.parent is None:
        return True
    # a token that was made while its parent was being revoked is not among those that were revoked with it
    parent = tx.execute(select(tokens).where(tokens.c.id == row.parent)).one_or_none()
    return parent is not None and _is_valid(tx, parent, now)


def _make_token_view(row: Row[Any]) -> TokenView:
    return TokenView(
        id=row.id,
        name=row.name,
        role=Role(row.role),
        projects=None if row.projects is None else tuple(json.loads(row.projects)),
        user=row.user,
        created_at=row.created_at,
        created_by=row.created_by,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
        cluster=row.cluster,
        parent=row.parent,
        personal=row.personal,
    )


def begin_session(
    tx: Transaction, secret: str, principal: Principal, *, now: float, ends_at: float, is_link: bool = False
) -> None:
    """Begin a session, and delete those that have ended. `secret`: what the cookie holds, or the code of a link."""
    tx.execute(delete(sessions).where(sessions.c.expires_at <= now))
    row = {
        "hash": hash_secret(secret),
        "token_id": principal.token_id or None,
        "principal": "" if principal.token_id else _PRINCIPAL.dump_json(principal).decode(),
        "is_link": int(is_link),
        "created_at": now,
        "expires_at": ends_at,
    }
    tx.execute(insert(sessions), row)


def find_principal_by_session(tx: Transaction, secret: str, *, now: float, is_link: bool = False) -> Principal | None:
    """Find the principal of a session; None if it has ended, or its token is not valid."""
    query = select(sessions).where(
        sessions.c.hash == hash_secret(secret), sessions.c.is_link == int(is_link), sessions.c.expires_at > now
    )
    row = tx.execute(query).one_or_none()
    return None if row is None else _find_principal_of_row(tx, row, now)


def take_link(tx: Transaction, code: str, *, now: float) -> Principal | None:
    """Use up a link, and return the principal that made it; None if it is not valid."""
    taken = (
        delete(sessions)
        .where(sessions.c.hash == hash_secret(code), sessions.c.is_link == 1)
        .returning(sessions.c.token_id, sessions.c.principal, sessions.c.expires_at)
    )
    row = tx.execute(taken).one_or_none()
    if row is None or row.expires_at <= now:
        return None
    return _find_principal_of_row(tx, row, now)


def end_session(tx: Transaction, secret: str) -> None:
    """End a session. Idempotent."""
    tx.execute(delete(sessions).where(sessions.c.hash == hash_secret(secret)))


_PRINCIPAL = TypeAdapter(Principal)


def _find_principal_of_row(tx: Transaction, row: Row[*tuple[Any, ...]], now: float) -> Principal | None:
    """Find whom a session or a link stands for; None if its token is not valid."""
    return find_principal_by_id(tx, row.token_id, now=now) if row.token_id else _PRINCIPAL.validate_json(row.principal)


DONE = "done"
_MAX_PATH = 500
_BATCH = 5_000


@dataclass(slots=True)
class AuditEntry:
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

    def set_actor(self, principal: Principal) -> None:
        self.actor, self.role, self.token_id = principal.name, principal.role.value, principal.token_id


CURRENT_ENTRY: ContextVar[AuditEntry | None] = ContextVar("audit_entry", default=None)
"""Entry of the request that is served; None if the service itself acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """Selects events of the audit; None means all."""

    before: int | None = None
    job_id: str | None = None
    actor: str | None = None
    limit: int = 100


def record(tx: Transaction, entry: AuditEntry, outcome: str = DONE) -> None:
    row = {
        "at": entry.at,
        "actor": entry.actor,
        "role": entry.role,
        "token_id": entry.token_id,
        "address": entry.address,
        "operation": entry.operation,
        "path": entry.path[:_MAX_PATH],
        "job_id": entry.job_id,
        "outcome": outcome,
    }
    tx.execute(insert(audit), row)


def record_refusal(tx: Transaction, entry: AuditEntry, outcome: str) -> None:
    """Record the code of a request that changed no row, or was refused. `Store.write` then adds no record."""
    entry.is_recorded = True
    record(tx, entry, outcome)


@contextmanager
def preparing() -> Iterator[None]:
    """Leave what is written within this block out of the audit: it only prepares the request."""
    token = CURRENT_ENTRY.set(None)
    try:
        yield
    finally:
        CURRENT_ENTRY.reset(token)


def note_created(*, job_id: str = "", path: str | None = None) -> None:
    """Note what the request that is served has created: a job, or another resource at a path."""
    entry = CURRENT_ENTRY.get()
    if entry is not None:
        entry.job_id, entry.path = job_id, path or entry.path


def make_actor_field() -> dict[str, Any]:
    """Return the field `by` of an event: the principal whose request is served, if there is one."""
    entry = CURRENT_ENTRY.get()
    return {"by": entry.actor} if entry is not None and entry.actor else {}


def read(tx: Transaction, query: AuditQuery) -> list[AuditEvent]:
    """Read the audit, newest first."""
    rows = select(audit).order_by(audit.c.num.desc()).limit(query.limit)
    if query.before is not None:
        rows = rows.where(audit.c.num < query.before)
    for column, value in ((audit.c.job_id, query.job_id), (audit.c.actor, query.actor)):
        if value is not None:
            rows = rows.where(column == value)
    return [AuditEvent(number=row.num, **columns_for(AuditEvent, row)) for row in tx.execute(rows)]


def count_before(tx: Transaction, before: float) -> int:
    return int(tx.execute(select(func.count()).where(audit.c.at < before)).scalar_one())


def remove_before(tx: Transaction, before: float, *, reason: str, now: float) -> int:
    """Delete a batch of the oldest records, and record that in the same transaction."""
    oldest = select(audit.c.num).where(audit.c.at < before).order_by(audit.c.num).limit(_BATCH)
    nums = list(tx.execute(oldest).scalars())
    if not nums:
        return 0
    tx.execute(delete(audit).where(audit.c.num.in_(nums)))
    until = datetime.fromtimestamp(before, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    entry = AuditEntry(at=now, address="", operation="retention of the audit", path="", actor="retention")
    entry.path = f"{len(nums)} records before {until} deleted: {reason}"
    record(tx, entry)
    return len(nums)
