"""Cordons of nodes, maintenance windows, how long drains took, and where a drain comes from.

Drains that are stored were requested through the API.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("node_drains", sa.Column("source", sa.String(length=16), nullable=False, server_default="api"))
    op.create_table(
        "node_cordons",
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("node_id", name="pk_node_cordons"),
    )
    op.create_table(
        "maintenance_windows",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("nodes", sa.Text(), nullable=False),
        sa.Column("begins_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_maintenance_windows"),
    )
    op.create_table(
        "drain_times",
        sa.Column("num", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("drain_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("num", name="pk_drain_times"),
    )
