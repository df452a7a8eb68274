"""The tables of access. A secret is stored as its SHA-256 in hexadecimal digits.

No method of the store updates or deletes a row of `audit`.
"""

from __future__ import annotations

from sqlalchemy import Column, Double, ForeignKey, Index, Integer, String, Table, Text

from shoal_service.store.tables import Serial, metadata

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("name", String(63), nullable=False),
    Column("role", String(16), nullable=False),
    Column("projects", Text, nullable=True),  # JSON: a list of names; null: all
    Column("user", String(63), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
    Column("last_used_at", Double, nullable=True),
    Column("cluster", String(63), nullable=True),  # of the gateway that shows it; null: it is not one of a gateway
)

sessions = Table(
    "sessions",
    metadata,
    Column("hash", String(64), primary_key=True),  # of the cookie, or of the code of a link
    Column("token_id", String(16), ForeignKey("tokens.id", ondelete="CASCADE"), nullable=True),  # null: a JWT's
    Column("principal", Text, nullable=False),  # JSON, of a JWT; else empty
    Column("is_link", Integer, nullable=False),  # 1: a code, which is exchanged once for a session
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index(None, "expires_at"),
)

audit = Table(
    "audit",
    metadata,
    Column("num", Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("role", String(16), nullable=False),
    Column("token_id", String(16), nullable=False),
    Column("address", String(64), nullable=False),
    Column("operation", String(200), nullable=False),  # method and route
    Column("path", Text, nullable=False),
    Column("job_id", String(64), nullable=False),
    Column("outcome", String(32), nullable=False),  # done, or the code of the problem
    Index(None, "at"),
    Index(None, "job_id", "num"),
    Index(None, "actor", "num"),
)
