"""The first schema. A migration describes the past: it does not follow later changes of database.py.

Schemas 0001 to 0031 were those of earlier releases or of none, which `migrate` refuses: revisions are compared as text.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = None
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("num", _SERIAL, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("token_id", sa.String(16), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("operation", sa.String(200), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
    )
    op.create_index(None, "audit", ["actor", "num"])
    op.create_index(None, "audit", ["at"])
    op.create_index(None, "audit", ["job_id", "num"])
    op.create_table(
        "clusters",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("life", sa.String(16), nullable=False),
        sa.Column("token_id", sa.String(16), nullable=False),
        sa.Column("report", sa.BigInteger(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("snapshot", sa.Text(), nullable=False),
        sa.Column("snapshot_report", sa.BigInteger(), nullable=False),
        sa.Column("last_order", sa.BigInteger(), nullable=False),
        sa.Column("ray_cluster", sa.String(64), nullable=False, server_default=""),
        sa.Column("labels", sa.Text(), nullable=False, server_default="{}"),
        sa.Column("cordon", sa.Text(), nullable=False, server_default=""),
    )
    op.create_table(
        "code_archives",
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("stored_at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "deletions",
        sa.Column("job_id", sa.String(32), primary_key=True),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("document", sa.Text(), nullable=False),
    )
    op.create_index(None, "deletions", ["finished_at"])
    op.create_table(
        "fleet_goodput",
        sa.Column("bin_at", sa.Double(), primary_key=True),
        sa.Column("productive", sa.Double(), nullable=False),
        sa.Column("total", sa.Double(), nullable=False),
    )
    op.create_table(
        "job_views",
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("saved_at", sa.Double(), nullable=False),
        sa.Column("saved_by", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("project", "name"),
    )
    op.create_table(
        "jobs",
        sa.Column("num", _SERIAL, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), unique=True, nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("desired", sa.String(16), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("user", sa.String(63), nullable=False),
        sa.Column("spec_version", sa.Integer(), nullable=False),
        sa.Column("spec_hash", sa.String(64), nullable=False),
        sa.Column("idempotency_key_hash", sa.String(64), unique=True, nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("cluster", sa.String(63), nullable=False, server_default=""),
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
        sa.Column("sampled_at", sa.Double(), nullable=False, server_default="0"),
        sa.Column("sampled_productive", sa.Double(), nullable=False, server_default="0"),
        sa.Column("sampled_total", sa.Double(), nullable=False, server_default="0"),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("workers", sa.Text(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=True),
        sa.Column("step_times", sa.Text(), nullable=False, server_default=""),
        sa.Column("pins", sa.Text(), nullable=False, server_default="[]"),
        sa.Column("profile", sa.Text(), nullable=False, server_default=""),
        sa.Column("deleting", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("held", sa.String(160), nullable=True),
        sa.Column("archived_at", sa.Double(), nullable=True),
        sa.Column("thinned_until", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.create_index(None, "jobs", ["ended_at"])
    op.create_index(None, "jobs", ["held"])
    op.create_index(None, "jobs", ["project", "num"])
    op.create_index(None, "jobs", ["state", "num"])
    op.create_index(None, "jobs", ["state", "priority", "num"])
    op.create_index(None, "jobs", ["state", "project"])
    op.create_index(None, "jobs", ["state", "project", "queued_at"])
    op.create_index(None, "jobs", ["state", "user"])
    op.create_index(None, "jobs", ["updated_at"])
    op.create_table(
        "lease",
        sa.Column("num", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("session_owner", sa.String(255), nullable=False, server_default=""),
    )
    op.create_table(
        "model_aliases",
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("project", "name", "alias"),
    )
    op.create_table(
        "model_versions",
        sa.Column("project", sa.String(63), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("checkpoint", sa.String(100), nullable=False),
        sa.Column("removed", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("project", "name", "version"),
    )
    op.create_index(None, "model_versions", ["job_id"])
    op.create_table(
        "node_cordons",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "node_drains",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=True),
        sa.Column("source", sa.String(16), nullable=False),
    )
    op.create_table(
        "node_suspicions",
        sa.Column("node_id", sa.String(64), primary_key=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("probation_s", sa.Double(), nullable=False),
        sa.Column("next_test_at", sa.Double(), nullable=False),
        sa.Column("num_tests", sa.Integer(), nullable=False),
        sa.Column("job_ids", sa.Text(), nullable=False),
        sa.Column("avoided_until", sa.Double(), nullable=False),
    )
    op.create_table(
        "projects",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("parent", sa.String(63), nullable=True),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("guaranteed", sa.Integer(), nullable=False),
        sa.Column("limit", sa.Integer(), nullable=True),
        sa.Column("max_running", sa.Integer(), nullable=True),
        sa.Column("max_queued", sa.Integer(), nullable=True),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("hash", sa.String(64), unique=True, nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("projects", sa.Text(), nullable=True),
        sa.Column("user", sa.String(63), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.Column("cluster", sa.String(63), nullable=True),
        sa.Column("parent", sa.String(16), nullable=True),
        sa.Column("personal", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "users",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("max_running", sa.Integer(), nullable=True),
        sa.Column("max_queued", sa.Integer(), nullable=True),
    )
    op.create_table(
        "webhooks",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("receiver", sa.Text(), nullable=False),
        sa.Column("events", sa.Text(), nullable=False),
    )
    op.create_table(
        "attempt_tokens",
        sa.Column(
            "job_num",
            sa.BigInteger(),
            sa.ForeignKey("jobs.num", ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("hash", sa.String(64), unique=True, nullable=False),
        sa.Column("life", sa.BigInteger(), nullable=False),
        sa.Column("reported_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("committed_at", sa.Double(), nullable=True),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "step", "attempt", "generation"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "cluster_orders",
        sa.Column("cluster", sa.String(63), sa.ForeignKey("clusters.name", ondelete="CASCADE"), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(63), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.Column("archive", sa.String(64), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("answered_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("cluster", "number"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "directives",
        sa.Column(
            "job_num",
            sa.BigInteger(),
            sa.ForeignKey("jobs.num", ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("stacks", sa.Text(), nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "seq"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "growth_answers",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), primary_key=True),
        sa.Column("spec_version", sa.Integer(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("max_workers", sa.Integer(), nullable=False),
        sa.Column("limit", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "incidents",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("cause", sa.String(32), nullable=False),
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
        sa.Column("bytes_moved", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("job_num", "attempt", "id"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "job_labels",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("key", sa.String(63), nullable=False),
        sa.Column("value", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "key"),
        sqlite_with_rowid=False,
    )
    op.create_index(None, "job_labels", ["key", "value"])
    op.create_table(
        "job_samples",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("granted", sa.Integer(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "at"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "job_specs",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "version"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "logs",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("worker_id", sa.String(128), nullable=False),
        sa.Column("stream", sa.String(16), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("job_num", "seq"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "profiles",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "number"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "queue_places",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), primary_key=True),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("holders", sa.Text(), nullable=False),
        sa.Column("expected_at", sa.Double(), nullable=True),
        sa.Column("decided_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "series",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=True),
        sa.Column("tokens_per_s", sa.Double(), nullable=True),
        sa.Column("step_s", sa.Double(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("val_loss", sa.Double(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=True),
        sa.Column("val_metrics", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("job_num", "step"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "series_rollups",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=True),
        sa.Column("tokens_per_s", sa.Double(), nullable=True),
        sa.Column("step_s", sa.Double(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("val_loss", sa.Double(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=True),
        sa.Column("val_metrics", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("job_num", "width", "bucket"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "sessions",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("token_id", sa.String(16), sa.ForeignKey("tokens.id", ondelete="CASCADE"), nullable=True),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("is_link", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
    )
    op.create_index(None, "sessions", ["expires_at"])
    op.create_table(
        "system_samples",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("width_s", sa.Integer(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "width_s", "bucket"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "island_rounds",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("contributions", sa.Text(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("job_num", "round"),
    )
    op.create_table(
        "webhook_cursors",
        sa.Column("job_num", sa.BigInteger(), sa.ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False),
        sa.Column("hook", sa.String(80), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("num_failed", sa.Integer(), nullable=False),
        sa.Column("failing_since", sa.Double(), nullable=True),
        sa.Column("next_at", sa.Double(), nullable=True),
        sa.Column("waiting_since", sa.Double(), nullable=True),
        sa.Column("delivered", sa.BigInteger(), nullable=False),
        sa.Column("gave_up", sa.BigInteger(), nullable=False),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_num", "hook"),
        sqlite_with_rowid=False,
    )
    op.create_index(None, "webhook_cursors", ["hook", "waiting_since"])
    op.execute("INSERT INTO lease (num, owner, epoch, expires_at) VALUES (1, '', 0, 0)")
