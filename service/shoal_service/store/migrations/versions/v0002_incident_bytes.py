"""A column for the bytes that were read to restore, since the metrics sum them by cause."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("incidents", sa.Column("bytes_moved", sa.BigInteger(), nullable=True))
