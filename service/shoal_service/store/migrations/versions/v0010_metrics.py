"""What metrics count over the life of a job: its step times, and since when it has been in the queue."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("queued_at", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("step_times", sa.Text(), nullable=False, server_default=""))
    op.create_index("ix_jobs_state_project_queued_at", "jobs", ["state", "project", "queued_at"])
    op.create_index("ix_jobs_ended_at", "jobs", ["ended_at"])
