"""Drains of nodes, and nodes on probation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "node_drains",
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("node_id", name="pk_node_drains"),
    )
    op.create_table(
        "node_suspicions",
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("probation_s", sa.Double(), nullable=False),
        sa.Column("next_test_at", sa.Double(), nullable=False),
        sa.Column("num_tests", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("node_id", name="pk_node_suspicions"),
    )
