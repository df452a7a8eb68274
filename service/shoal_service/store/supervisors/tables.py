"""The tables of a job's newest attempt. A row goes with its job, or is replaced by the next attempt's."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, String, Table, Text

from shoal_service.store.tables import metadata


def _job_num() -> Column[int]:
    foreign = ForeignKey("jobs.num", ondelete="CASCADE")
    return Column("job_num", BigInteger, foreign, primary_key=True, autoincrement=False)


attempt_tokens = Table(
    "attempt_tokens",
    metadata,
    _job_num(),
    Column("attempt", Integer, nullable=False),
    Column("hash", String(64), nullable=False, unique=True),  # SHA-256 of the token, in hexadecimal digits
    Column("life", BigInteger, nullable=False),  # the highest of the supervisors that have reported; 0: none has
    Column("reported_at", Double, nullable=False),  # when the last report was stored; 0: none was
)

directives = Table(
    "directives",
    metadata,
    _job_num(),
    Column("attempt", Integer, nullable=False),
    Column("number", BigInteger, nullable=False),  # rises with each directive of the attempt
    Column("epoch", BigInteger, nullable=False),  # lease epoch of the control plane that wrote it
    Column("body", Text, nullable=False),  # JSON: a Directive
    Column("stacks", Text, nullable=False),  # JSON: the newest StacksAnswer; empty: there is none
)
