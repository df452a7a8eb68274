"""Metrics of a task's own in the series and in its roll-ups."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("series", "series_rollups"):
        for name in ("metrics", "val_metrics"):
            op.add_column(table, sa.Column(name, sa.Text(), nullable=True))
