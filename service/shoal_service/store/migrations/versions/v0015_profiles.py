"""Profiles of running jobs: the open request of each job, and what the requests have led to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("profile", sa.Text(), nullable=False, server_default=""))
    op.create_table(
        "profiles",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name=op.f("fk_profiles_job_num_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", "number", name=op.f("pk_profiles")),
        sqlite_with_rowid=False,
    )
