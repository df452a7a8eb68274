"""API tokens: made, found by what a request shows, listed, revoked. Functions of an open transaction, called by
`Store`.

A token that has expired or is revoked stays in the table, so that the audit's ids keep their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, bindparam, or_, select, update

from shoal_service.access_views import TokenRequest, TokenView
from shoal_service.core.access import Principal, Role, hash_of, id_of
from shoal_service.store.access.tables import tokens
from shoal_service.store.database import insert
from shoal_service.store.errors import TokenNotFound


def create(
    connection: Connection, token: str, request: TokenRequest, *, by: str, now: float, cluster: str | None = None
) -> TokenView:
    """`token` is one of `new_token`; `by`: name of the principal that makes it; `cluster`: whose gateway shows it."""
    row = _row(token, request, by=by, now=now, cluster=cluster)
    connection.execute(insert(connection, tokens).values(row))
    return view(connection, row["id"])


def adopt(
    connection: Connection, token: str, request: TokenRequest, *, by: str, now: float, cluster: str | None = None
) -> TokenView:
    """The same for a token of a file, which several servers may read. One whose id is known stays as it is."""
    row = _row(token, request, by=by, now=now, cluster=cluster)
    # No index is named: servers that insert the same token at once may meet at that of the hash first.
    connection.execute(insert(connection, tokens).values(row).on_conflict_do_nothing())
    return view(connection, row["id"])


def _row(token: str, request: TokenRequest, *, by: str, now: float, cluster: str | None) -> dict[str, Any]:
    token_id = id_of(token)
    assert token_id is not None, "not a token"
    is_admin = request.role is Role.ADMIN
    return {
        "id": token_id,
        "hash": hash_of(token),
        "name": request.name,
        "role": request.role.value,
        "projects": None if request.projects is None else json.dumps(sorted(set(request.projects))),
        "user": request.user or ("" if is_admin else request.name),
        "created_at": now,
        "created_by": by,
        "expires_at": None if request.expires_in_s is None else now + request.expires_in_s,
        "cluster": cluster,
    }


def find(connection: Connection, digest: str, *, now: float) -> Principal | None:
    """Who has shown the token with this hash; None: no valid token has it."""
    row = connection.execute(select(tokens).where(tokens.c.hash == digest)).one_or_none()
    return None if row is None or not _is_valid(row, now) else principal_of(row)


def of_id(connection: Connection, token_id: str, *, now: float) -> Principal | None:
    """Whose the token is, if it is valid."""
    row = connection.execute(select(tokens).where(tokens.c.id == token_id)).one_or_none()
    return None if row is None or not _is_valid(row, now) else principal_of(row)


def listed(connection: Connection) -> list[TokenView]:
    """Newest first, with those that have ended."""
    query = select(tokens).order_by(tokens.c.created_at.desc(), tokens.c.id)
    return [_view(row) for row in connection.execute(query)]


def view(connection: Connection, token_id: str) -> TokenView:
    """Raises TokenNotFound."""
    row = connection.execute(select(tokens).where(tokens.c.id == token_id)).one_or_none()
    if row is None:
        raise TokenNotFound(token_id)
    return _view(row)


def revoke(connection: Connection, token_id: str, *, now: float) -> TokenView:
    """Idempotent. Raises TokenNotFound."""
    still = (tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
    connection.execute(update(tokens).where(*still).values(revoked_at=now))
    return view(connection, token_id)


def is_revoked(connection: Connection, token_id: str) -> bool:
    """False: it is valid, has expired, or there is none."""
    query = select(tokens.c.revoked_at).where(tokens.c.id == token_id)
    return connection.execute(query).scalar_one_or_none() is not None


def note_use(connection: Connection, used: Mapping[str, float]) -> None:
    """When tokens were used last, by id."""
    newer = or_(tokens.c.last_used_at.is_(None), tokens.c.last_used_at < bindparam("at"))
    statement = update(tokens).where(tokens.c.id == bindparam("token"), newer).values(last_used_at=bindparam("at"))
    connection.execute(statement, [{"token": token_id, "at": at} for token_id, at in used.items()])


def principal_of(row: Row[Any]) -> Principal:
    return Principal(
        name=row.name,
        role=Role(row.role),
        projects=None if row.projects is None else frozenset(json.loads(row.projects)),
        user=row.user,
        token_id=row.id,
        expires_at=row.expires_at,
        cluster=row.cluster or "",
    )


def _is_valid(row: Row[Any], now: float) -> bool:
    return row.revoked_at is None and (row.expires_at is None or now < row.expires_at)


def _view(row: Row[Any]) -> TokenView:
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
    )
