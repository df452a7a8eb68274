"""Learning rate and throughput of a step may be missing: a script reports what it logs.

SQLite cannot change a column, so its tables are copied. That takes some seconds for ten million steps.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_KEYS = {"series": ("step",), "series_rollups": ("width", "bucket")}
_MAY_BE_MISSING = ("lr", "tokens_per_s")


def upgrade() -> None:
    for table in _KEYS:
        if op.get_bind().dialect.name == "sqlite":
            _copy(table)
        else:
            for name in _MAY_BE_MISSING:
                op.alter_column(table, name, nullable=True)


def _copy(table: str) -> None:
    columns = _columns(table)
    names = ", ".join(f'"{column.name}"' for column in columns)
    op.rename_table(table, f"{table}_before")
    op.create_table(table, *columns, _primary_key(table), sqlite_with_rowid=False)
    op.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM {table}_before")
    op.drop_table(f"{table}_before")


def _columns(table: str) -> list[sa.Column[Any]]:
    job_num = sa.ForeignKey("jobs.num", ondelete="CASCADE", name=f"fk_{table}_job_num")
    bucket: list[sa.Column[Any]] = (
        [sa.Column("width", sa.Integer(), nullable=False), sa.Column("bucket", sa.BigInteger(), nullable=False)]
        if table == "series_rollups"
        else []
    )
    return [
        sa.Column("job_num", sa.BigInteger(), job_num, nullable=False),
        *bucket,
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        *(sa.Column(name, sa.Double(), nullable=True) for name in _MAY_BE_MISSING),
        sa.Column("step_s", sa.Double(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("val_loss", sa.Double(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=True),
        sa.Column("val_metrics", sa.Text(), nullable=True),
    ]


def _primary_key(table: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint("job_num", *_KEYS[table], name=f"pk_{table}")
