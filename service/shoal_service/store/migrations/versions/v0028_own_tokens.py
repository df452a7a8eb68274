"""Tokens that people make: the token that each was made with, and which tokens are people's."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("parent", sa.String(length=16), nullable=True))
    op.add_column("tokens", sa.Column("personal", sa.Boolean(), nullable=False, server_default=sa.false()))
