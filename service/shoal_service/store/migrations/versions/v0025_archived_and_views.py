"""Archived jobs, and the named views of the table of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("archived_at", sa.Double(), nullable=True))
    op.create_table(
        "job_views",
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("saved_at", sa.Double(), nullable=False),
        sa.Column("saved_by", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("project", "name", name="pk_job_views"),
    )
