"""The user of each job, and the limits of users.

Jobs that are stored are of the user `default`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("user", sa.String(length=63), nullable=False, server_default="default"))
    op.create_index("ix_jobs_state_user", "jobs", ["state", "user"])
    op.create_table(
        "users",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("max_running", sa.Integer(), nullable=True),
        sa.Column("max_queued", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_users"),
    )
