"""Supervisors dial home: tokens of attempts, and the directives for their supervisors, in place of the keys with which
the control plane signed its calls.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "attempt_tokens",
        sa.Column("job_num", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("life", sa.BigInteger(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_num"], ["jobs.num"], name=op.f("fk_attempt_tokens_job_num_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_num", name=op.f("pk_attempt_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_attempt_tokens_hash")),
    )
    op.create_table(
        "directives",
        sa.Column("job_num", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("stacks", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name=op.f("fk_directives_job_num_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", name=op.f("pk_directives")),
    )
    op.drop_table("signing_keys")
