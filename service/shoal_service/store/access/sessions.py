"""Sessions of the page, and the links that begin one. Functions of an open transaction, called by `Store`.

A session that a token began is valid as long as the token is; one of a JWT carries its principal.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from shoal_service.core.access import Principal, Role, hash_of
from shoal_service.store.access import tokens
from shoal_service.store.access.tables import sessions


def begin(
    connection: Connection, secret: str, principal: Principal, *, now: float, ends_at: float, is_link: bool = False
) -> None:
    """Stores a session, and deletes those that have ended."""
    connection.execute(delete(sessions).where(sessions.c.expires_at <= now))
    row = {
        "hash": hash_of(secret),
        "token_id": principal.token_id or None,
        "principal": "" if principal.token_id else _document(principal),
        "is_link": int(is_link),
        "created_at": now,
        "expires_at": ends_at,
    }
    connection.execute(insert(sessions), row)


def find(connection: Connection, secret: str, *, now: float, is_link: bool = False) -> Principal | None:
    """Whose session it is; None: it has ended, or its token has."""
    query = select(sessions).where(
        sessions.c.hash == hash_of(secret), sessions.c.is_link == int(is_link), sessions.c.expires_at > now
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    return tokens.of_id(connection, row.token_id, now=now) if row.token_id else _principal(row.principal)


def take_link(connection: Connection, code: str, *, now: float) -> Principal | None:
    """Who made the link; it can be used once."""
    taken = (
        delete(sessions)
        .where(sessions.c.hash == hash_of(code), sessions.c.is_link == 1)
        .returning(sessions.c.token_id, sessions.c.principal, sessions.c.expires_at)
    )
    row = connection.execute(taken).one_or_none()
    if row is None or row.expires_at <= now:
        return None
    return tokens.of_id(connection, row.token_id, now=now) if row.token_id else _principal(row.principal)


def end(connection: Connection, secret: str) -> None:
    """Idempotent."""
    connection.execute(delete(sessions).where(sessions.c.hash == hash_of(secret)))


def _document(principal: Principal) -> str:
    document: dict[str, Any] = {"name": principal.name, "role": principal.role.value, "user": principal.user}
    document["projects"] = None if principal.projects is None else sorted(principal.projects)
    document["expires_at"] = principal.expires_at
    return json.dumps(document)


def _principal(document: str) -> Principal:
    known = json.loads(document)
    return Principal(
        name=known["name"],
        role=Role(known["role"]),
        projects=None if known["projects"] is None else frozenset(known["projects"]),
        user=known["user"],
        expires_at=known["expires_at"],
    )
