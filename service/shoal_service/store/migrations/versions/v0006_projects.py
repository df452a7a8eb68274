"""Projects with quotas, the project of each job, and the places of the jobs in the queue.

Jobs that are stored are in the project `default`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("project", sa.String(length=63), nullable=False, server_default="default"))
    op.create_index("ix_jobs_project_num", "jobs", ["project", "num"])
    op.create_index("ix_jobs_state_project", "jobs", ["state", "project"])
    op.create_table(
        "projects",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("parent", sa.String(length=63), nullable=True),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("guaranteed", sa.Integer(), nullable=False),
        sa.Column("limit", sa.Integer(), nullable=True),
        sa.Column("max_running", sa.Integer(), nullable=True),
        sa.Column("max_queued", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_projects"),
    )
    op.create_table(
        "queue_places",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("holders", sa.Text(), nullable=False),
        sa.Column("expected_at", sa.Double(), nullable=True),
        sa.Column("decided_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name="fk_queue_places_job_num", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", name="pk_queue_places"),
    )
