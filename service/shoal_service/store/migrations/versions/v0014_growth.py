"""Growth answers: why a running job gets no more workers, and the version of the spec that was answered last."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "growth_answers",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("spec_version", sa.Integer(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("max_workers", sa.Integer(), nullable=False),
        sa.Column("limit", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name="fk_growth_answers_job_num_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", name="pk_growth_answers"),
    )
