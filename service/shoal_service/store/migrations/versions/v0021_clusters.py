"""Clusters that join: what their gateways report, the orders to them, and tokens that are of one cluster."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("cluster", sa.String(length=63), nullable=True))
    op.create_table(
        "clusters",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("life", sa.String(length=16), nullable=False),
        sa.Column("token_id", sa.String(length=16), nullable=False),
        sa.Column("report", sa.BigInteger(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("snapshot", sa.Text(), nullable=False),
        sa.Column("snapshot_report", sa.BigInteger(), nullable=False),
        sa.Column("last_order", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_clusters")),
    )
    op.create_table(
        "cluster_orders",
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=63), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.Column("archive", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("answered_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["cluster"], ["clusters.name"], name=op.f("fk_cluster_orders_cluster_clusters"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("cluster", "number", name=op.f("pk_cluster_orders")),
        sqlite_with_rowid=False,
    )
