"""Webhooks: the hooks of the settings, and how far each hook has delivered the events of each job.

Jobs that exist have no hooks of their own, so there is nothing to fill in.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("receiver", sa.Text(), nullable=False),
        sa.Column("events", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_webhooks"),
    )
    op.create_table(
        "webhook_cursors",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("hook", sa.String(length=80), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("num_failed", sa.Integer(), nullable=False),
        sa.Column("failing_since", sa.Double(), nullable=True),
        sa.Column("next_at", sa.Double(), nullable=True),
        sa.Column("waiting_since", sa.Double(), nullable=True),
        sa.Column("delivered", sa.BigInteger(), nullable=False),
        sa.Column("gave_up", sa.BigInteger(), nullable=False),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name="fk_webhook_cursors_job_num_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", "hook", name="pk_webhook_cursors"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_webhook_cursors_hook_waiting_since", "webhook_cursors", ["hook", "waiting_since"])
