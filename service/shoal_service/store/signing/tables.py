"""The table of private keys. A row goes with its job, or is replaced by the next attempt's."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Integer, String, Table

from shoal_service.store.tables import metadata

signing_keys = Table(
    "signing_keys",
    metadata,
    Column("job_num", BigInteger, ForeignKey("jobs.num", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("attempt", Integer, nullable=False),
    Column("seed", String(64), nullable=False),  # Ed25519 private key, in hexadecimal digits
)
