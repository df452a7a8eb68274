"""Deletions of jobs, which are continued after a crash; a job that is being deleted says so."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("deleting", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_table(
        "deletions",
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_deletions")),
    )
    op.create_index(op.f("ix_deletions_finished_at"), "deletions", ["finished_at"])
    op.create_index(op.f("ix_deletions_requested_at"), "deletions", ["requested_at"])
