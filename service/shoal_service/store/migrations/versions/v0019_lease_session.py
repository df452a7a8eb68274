"""The owner of the lease holds a lock of PostgreSQL too, by which others see that it has ended. And an index goes that
nothing needs.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index(op.f("ix_deletions_requested_at"), "deletions")
    op.add_column("lease", sa.Column("session_owner", sa.String(255), nullable=False, server_default=""))
