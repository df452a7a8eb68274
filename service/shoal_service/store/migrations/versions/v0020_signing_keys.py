"""Private keys of attempts, with which the control plane signs its calls to supervisors. Attempts that run now go on
without one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "signing_keys",
        sa.Column("job_num", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("seed", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_num"], ["jobs.num"], name=op.f("fk_signing_keys_job_num_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_num", name=op.f("pk_signing_keys")),
    )
