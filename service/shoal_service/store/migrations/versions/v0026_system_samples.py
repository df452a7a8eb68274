"""System metrics by rank over time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "system_samples",
        sa.Column(
            "job_num",
            sa.BigInteger(),
            sa.ForeignKey("jobs.num", ondelete="CASCADE", name="fk_system_samples_job_num"),
            nullable=False,
        ),
        sa.Column("width_s", sa.Integer(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "width_s", "bucket", name="pk_system_samples"),
        sqlite_with_rowid=False,
    )
