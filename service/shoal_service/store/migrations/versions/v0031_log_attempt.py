"""The attempt in which each line of a job's log was written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("logs", sa.Column("attempt", sa.Integer(), nullable=True))
