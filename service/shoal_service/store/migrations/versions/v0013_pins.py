"""Pins: the checkpoints of a job that retention never deletes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("pins", sa.Text(), nullable=False, server_default="[]"))
