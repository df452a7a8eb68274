"""The step up to which the series of a job is thinned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("thinned_until", sa.BigInteger(), nullable=False, server_default="0"))
