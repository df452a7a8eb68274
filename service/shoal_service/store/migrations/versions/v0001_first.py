"""The first schema. A migration describes the past: it does not follow later changes of tables.py."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "code_archives",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_code_archives"),
    )
    op.create_table(
        "jobs",
        sa.Column("num", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("desired", sa.String(length=16), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("spec_version", sa.Integer(), nullable=False),
        sa.Column("spec_hash", sa.String(length=64), nullable=False),
        sa.Column("idempotency_key_hash", sa.String(length=64), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("granted_workers", sa.Integer(), nullable=False),
        sa.Column("pulled_seq", sa.BigInteger(), nullable=False),
        sa.Column("event_seq", sa.BigInteger(), nullable=False),
        sa.Column("log_seq", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failure_step", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("workers", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("num", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("idempotency_key_hash", name="uq_jobs_idempotency_key_hash"),
    )
    op.create_index("ix_jobs_state_num", "jobs", ["state", "num"], unique=False)
    op.create_index("ix_jobs_state_priority_num", "jobs", ["state", "priority", "num"], unique=False)
    op.create_table(
        "lease",
        sa.Column("num", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("num", name="pk_lease"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("committed_at", sa.Double(), nullable=True),
        sa.Column("document", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name="fk_checkpoints_job_num", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", "step", "attempt", "generation", name="pk_checkpoints"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "events",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name="fk_events_job_num", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", "seq", name="pk_events"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "incidents",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("cause", sa.String(length=32), nullable=False),
        sa.Column("closed", sa.Boolean(), nullable=False),
        sa.Column("steps_lost", sa.BigInteger(), nullable=True),
        sa.Column("detect_s", sa.Double(), nullable=True),
        sa.Column("quiesce_s", sa.Double(), nullable=True),
        sa.Column("plan_s", sa.Double(), nullable=True),
        sa.Column("form_s", sa.Double(), nullable=True),
        sa.Column("restore_s", sa.Double(), nullable=True),
        sa.Column("first_step_s", sa.Double(), nullable=True),
        sa.Column("recovery_s", sa.Double(), nullable=True),
        sa.Column("document", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name="fk_incidents_job_num", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", "attempt", "id", name="pk_incidents"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "job_specs",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name="fk_job_specs_job_num", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", "version", name="pk_job_specs"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "logs",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("shard_id", sa.String(length=128), nullable=False),
        sa.Column("stream", sa.String(length=16), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name="fk_logs_job_num", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", "seq", name="pk_logs"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "series",
        sa.Column("job_num", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=False),
        sa.Column("step_s", sa.Double(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("val_loss", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_num"], ["jobs.num"], name="fk_series_job_num", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_num", "step", name="pk_series"),
        sqlite_with_rowid=False,
    )
    op.execute("INSERT INTO lease (num, owner, epoch, expires_at) VALUES (1, '', 0, 0)")
