"""Jobs that go on from another job's checkpoint: which one they still need."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("held", sa.String(160), nullable=True))
    op.create_index("ix_jobs_held", "jobs", ["held"])
