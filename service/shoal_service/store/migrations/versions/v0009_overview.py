"""Tables of the pages: roll-ups of the series, samples of goodput and world size, goodput of the cluster, labels.

The series of jobs that are stored are rolled up when they go on; until then a view reads every step. Their goodput so
far is not part of the cluster's.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("sampled_at", "sampled_productive", "sampled_total"):
        op.add_column("jobs", sa.Column(name, sa.Double(), nullable=False, server_default="0"))
    op.create_index("ix_jobs_updated_at", "jobs", ["updated_at"])
    _note_goodput()
    op.create_table(
        "series_rollups",
        _job_num("series_rollups"),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=False),
        sa.Column("step_s", sa.Double(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("val_loss", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("job_num", "width", "bucket", name="pk_series_rollups"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "job_samples",
        _job_num("job_samples"),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("granted", sa.Integer(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "at", name="pk_job_samples"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "job_labels",
        _job_num("job_labels"),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("value", sa.String(length=255), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "key", name="pk_job_labels"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_job_labels_key_value", "job_labels", ["key", "value"])
    op.create_table(
        "fleet_goodput",
        sa.Column("bin_at", sa.Double(), nullable=False),
        sa.Column("productive", sa.Double(), nullable=False),
        sa.Column("total", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("bin_at", name="pk_fleet_goodput"),
    )


def _job_num(table: str) -> sa.Column[int]:
    return sa.Column(
        "job_num",
        sa.BigInteger(),
        sa.ForeignKey("jobs.num", ondelete="CASCADE", name=f"fk_{table}_job_num"),
        nullable=False,
    )


def _note_goodput() -> None:
    """What a stored job has booked so far counts as sampled, so that it is not added to the cluster's goodput of
    today."""
    jobs = sa.table("jobs", *(sa.column(name) for name in ("num", "status", "sampled_productive", "sampled_total")))
    connection = op.get_bind()
    for num, document in connection.execute(sa.select(jobs.c.num, jobs.c.status)).all():
        try:
            goodput = json.loads(document).get("goodput") or {}
            total, productive = float(goodput["total"]), float(goodput["seconds"].get("productive", 0.0))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        noted = sa.update(jobs).where(jobs.c.num == num).values(sampled_productive=productive, sampled_total=total)
        connection.execute(noted)
