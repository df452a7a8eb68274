"""Several clusters: in which one each job runs, labels and cordons of clusters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("cluster", sa.String(length=63), server_default="", nullable=False))
    op.add_column("clusters", sa.Column("ray_cluster", sa.String(length=64), server_default="", nullable=False))
    op.add_column("clusters", sa.Column("labels", sa.Text(), server_default="{}", nullable=False))
    op.add_column("clusters", sa.Column("cordon", sa.Text(), server_default="", nullable=False))
