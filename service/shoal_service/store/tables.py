"""The tables. They use only types that SQLite and PostgreSQL share: JSON is text, times are seconds since the epoch.

All rows of a job refer to `jobs.num`, a small integer that also orders the list of jobs (newest first) without ties.
Events, logs and series are keyed by (job_num, number), so that the rows of one job are adjacent.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    false,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
Serial = BigInteger().with_variant(Integer(), "sqlite")


def _job_num() -> Column[int]:
    return Column("job_num", BigInteger, ForeignKey("jobs.num", ondelete="CASCADE"), nullable=False)


jobs = Table(
    "jobs",
    metadata,
    Column("num", Serial, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("name", String(63), nullable=False),
    Column("state", String(16), nullable=False),
    Column("desired", String(16), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("project", String(63), nullable=False),
    Column("user", String(63), nullable=False),
    Column("spec_version", Integer, nullable=False),
    Column("spec_hash", String(64), nullable=False),  # of the submitted spec, for Idempotency-Key
    Column("idempotency_key_hash", String(64), nullable=True, unique=True),
    Column("attempt", Integer, nullable=False),
    Column("cluster", String(63), nullable=False, server_default=""),  # in which its newest attempt has begun
    Column("granted_workers", Integer, nullable=False),
    Column("pulled_seq", BigInteger, nullable=False),  # last stored report of the current attempt's supervisor
    Column("event_seq", BigInteger, nullable=False),
    Column("log_seq", BigInteger, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("failure_step", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False, index=True),
    Column("started_at", Double, nullable=True),
    Column("ended_at", Double, nullable=True),
    Column("sampled_at", Double, nullable=False, server_default="0"),  # the newest of job_samples ...
    Column("sampled_productive", Double, nullable=False, server_default="0"),  # ... and its goodput
    Column("sampled_total", Double, nullable=False, server_default="0"),
    Column("status", Text, nullable=False),  # JobStatus without the fields that have columns
    Column("failure", Text, nullable=True),  # UserFailure: a column of its own, so that lists do not load tracebacks
    Column("workers", Text, nullable=False),  # the newest WorkerViews
    Column("queued_at", Double, nullable=True),  # when it last entered the queue
    Column("step_times", Text, nullable=False, server_default=""),  # telemetry/metric.py
    Column("pins", Text, nullable=False, server_default="[]"),  # JSON: names of checkpoints
    Column("profile", Text, nullable=False, server_default=""),  # the open ProfileRequest; empty: there is none
    Column("deleting", Boolean, nullable=False, server_default=false()),  # there is a row of `deletions`
    Column("held", String(160), nullable=True, index=True),  # job/name: a checkpoint of another job that it needs
    Column("archived_at", Double, nullable=True),  # NULL: it is in the lists of jobs
    Column("thinned_until", BigInteger, nullable=False, server_default="0"),  # a step, see store/thinning.py
    Index(None, "state", "num"),
    Index(None, "state", "priority", "num"),
    Index(None, "project", "num"),
    Index(None, "state", "project"),
    Index(None, "state", "user"),
    Index(None, "state", "project", "queued_at"),
    Index(None, "ended_at"),
)

job_specs = Table(
    "job_specs",
    metadata,
    _job_num(),
    Column("version", Integer, nullable=False),
    Column("accepted_at", Double, nullable=False),
    Column("document", Text, nullable=False),
    PrimaryKeyConstraint("job_num", "version"),
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    _job_num(),
    Column("seq", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("type", String(64), nullable=False),
    Column("data", Text, nullable=False),
    PrimaryKeyConstraint("job_num", "seq"),
    sqlite_with_rowid=False,
)

incidents = Table(
    "incidents",
    metadata,
    _job_num(),
    Column("attempt", Integer, nullable=False),
    Column("id", BigInteger, nullable=False),
    Column("cause", String(32), nullable=False),
    Column("closed", Boolean, nullable=False),
    Column("steps_lost", BigInteger, nullable=True),
    Column("detect_s", Double, nullable=True),
    Column("quiesce_s", Double, nullable=True),
    Column("plan_s", Double, nullable=True),
    Column("form_s", Double, nullable=True),
    Column("restore_s", Double, nullable=True),
    Column("first_step_s", Double, nullable=True),
    Column("recovery_s", Double, nullable=True),
    Column("document", Text, nullable=False),
    Column("bytes_moved", BigInteger, nullable=True),
    PrimaryKeyConstraint("job_num", "attempt", "id"),
    sqlite_with_rowid=False,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _job_num(),
    Column("step", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("committed_at", Double, nullable=True),
    Column("document", Text, nullable=False),
    PrimaryKeyConstraint("job_num", "step", "attempt", "generation"),
    sqlite_with_rowid=False,
)

series = Table(
    "series",
    metadata,
    _job_num(),
    Column("step", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("loss", Double, nullable=True),  # NULL: NaN, which SQLite cannot store
    Column("grad_norm", Double, nullable=True),
    Column("lr", Double, nullable=True),  # NULL: a script has not reported it
    Column("tokens_per_s", Double, nullable=True),
    Column("step_s", Double, nullable=False),
    Column("world_size", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("val_loss", Double, nullable=True),
    Column("metrics", Text, nullable=True),  # JSON: the task's own metrics by name; NULL: none
    Column("val_metrics", Text, nullable=True),
    PrimaryKeyConstraint("job_num", "step"),
    sqlite_with_rowid=False,
)

series_rollups = Table(
    "series_rollups",
    metadata,
    _job_num(),
    Column("width", Integer, nullable=False),  # steps per bucket
    Column("bucket", BigInteger, nullable=False),  # (step - 1) // width
    Column("step", BigInteger, nullable=False),  # the last one in the bucket
    Column("at", Double, nullable=False),
    Column("loss", Double, nullable=True),
    Column("grad_norm", Double, nullable=True),
    Column("lr", Double, nullable=True),  # NULL: a script has not reported it
    Column("tokens_per_s", Double, nullable=True),
    Column("step_s", Double, nullable=False),
    Column("world_size", Integer, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("val_loss", Double, nullable=True),
    Column("metrics", Text, nullable=True),
    Column("val_metrics", Text, nullable=True),
    PrimaryKeyConstraint("job_num", "width", "bucket"),
    sqlite_with_rowid=False,
)

job_samples = Table(
    "job_samples",
    metadata,
    _job_num(),
    Column("at", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("granted", Integer, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("seconds", Text, nullable=False),  # JSON: worker-seconds by category of goodput; `recovering` by cause too
    PrimaryKeyConstraint("job_num", "at"),
    sqlite_with_rowid=False,
)

system_samples = Table(  # by rank, see store/system_samples.py
    "system_samples",
    metadata,
    _job_num(),
    Column("width_s", Integer, nullable=False),  # seconds per bucket
    Column("bucket", BigInteger, nullable=False),
    Column("at", Double, nullable=False),  # of the last measurement in the bucket
    Column("generation", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),  # all metrics of all ranks
    PrimaryKeyConstraint("job_num", "width_s", "bucket"),
    sqlite_with_rowid=False,
)

job_labels = Table(
    "job_labels",
    metadata,
    _job_num(),
    Column("key", String(63), nullable=False),
    Column("value", String(255), nullable=False),
    PrimaryKeyConstraint("job_num", "key"),
    Index(None, "key", "value"),
    sqlite_with_rowid=False,
)

fleet_goodput = Table(
    "fleet_goodput",
    metadata,
    Column("bin_at", Double, primary_key=True),  # beginning of ten minutes
    Column("productive", Double, nullable=False),
    Column("total", Double, nullable=False),
)

profiles = Table(
    "profiles",
    metadata,
    _job_num(),
    Column("number", Integer, nullable=False),
    Column("document", Text, nullable=False),
    PrimaryKeyConstraint("job_num", "number"),
    sqlite_with_rowid=False,
)

logs = Table(
    "logs",
    metadata,
    _job_num(),
    Column("seq", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("rank", Integer, nullable=True),
    Column("worker_id", String(128), nullable=False),
    Column("stream", String(16), nullable=False),
    Column("text", Text, nullable=False),
    Column("attempt", Integer, nullable=True),  # null: stored by a release that did not keep it
    PrimaryKeyConstraint("job_num", "seq"),
    sqlite_with_rowid=False,
)

code_archives = Table(
    "code_archives",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("stored_at", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

node_drains = Table(
    "node_drains",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("requested_at", Double, nullable=False),
    Column("deadline", Double, nullable=True),  # NULL: the node stays, but nothing may run on it
    Column("source", String(16), nullable=False),
)

node_cordons = Table(
    "node_cordons",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("requested_at", Double, nullable=False),
)


node_suspicions = Table(
    "node_suspicions",
    metadata,
    Column("node_id", String(64), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("since", Double, nullable=False),
    Column("job_id", String(32), nullable=False),  # no foreign key: a probation outlives the job
    Column("attempt", Integer, nullable=False),
    Column("probation_s", Double, nullable=False),
    Column("next_test_at", Double, nullable=False),
    Column("num_tests", Integer, nullable=False),  # failed tests
    Column("job_ids", Text, nullable=False),  # JSON: the jobs that suspect the node
    Column("avoided_until", Double, nullable=False),  # a job's own suspicion lasts until then at least
)

projects = Table(
    "projects",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("parent", String(63), nullable=True),
    Column("weight", Double, nullable=False),
    Column("guaranteed", Integer, nullable=False),
    Column("limit", Integer, nullable=True),
    Column("max_running", Integer, nullable=True),
    Column("max_queued", Integer, nullable=True),
)

users = Table(
    "users",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("max_running", Integer, nullable=True),
    Column("max_queued", Integer, nullable=True),
)

queue_places = Table(
    "queue_places",
    metadata,
    _job_num(),
    Column("position", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("holders", Text, nullable=False),  # JSON: ids of jobs
    Column("expected_at", Double, nullable=True),
    Column("decided_at", Double, nullable=False),
    PrimaryKeyConstraint("job_num"),
)

growth_answers = Table(  # of running jobs; kept for the next attempt
    "growth_answers",
    metadata,
    _job_num(),
    Column("spec_version", Integer, nullable=False),  # the newest one that the scheduler has answered
    Column("workers", Integer, nullable=False),  # granted when it answered
    Column("max_workers", Integer, nullable=False),
    Column("limit", String(32), nullable=False),  # GrowthLimit; empty: nothing holds the job back
    Column("reason", Text, nullable=False),
    Column("decided_at", Double, nullable=False),
    PrimaryKeyConstraint("job_num"),
)

webhooks = Table(  # of the settings; those of a spec are in it
    "webhooks",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("since", Double, nullable=False),  # older events are not delivered
    Column("receiver", Text, nullable=False),
    Column("events", Text, nullable=False),  # JSON: patterns
)

webhook_cursors = Table(
    "webhook_cursors",
    metadata,
    _job_num(),
    Column("hook", String(80), nullable=False),  # service/NAME or job/N
    Column("seq", BigInteger, nullable=False),  # number of the last event that was delivered, left out or given up
    Column("num_failed", Integer, nullable=False),
    Column("failing_since", Double, nullable=True),
    Column("next_at", Double, nullable=True),
    Column("waiting_since", Double, nullable=True),  # time of the event that failed; NULL: none has
    Column("delivered", BigInteger, nullable=False),
    Column("gave_up", BigInteger, nullable=False),
    Column("delivered_at", Double, nullable=True),
    Column("error", Text, nullable=False),  # of the last failed attempt
    PrimaryKeyConstraint("job_num", "hook"),
    Index(None, "hook", "waiting_since"),
    sqlite_with_rowid=False,
)

deletions = Table(  # of jobs; no foreign key: they outlive their jobs
    "deletions",
    metadata,
    Column("job_id", String(32), primary_key=True),
    Column("project", String(63), nullable=False),
    Column("requested_at", Double, nullable=False),
    Column("finished_at", Double, nullable=True),
    Column("document", Text, nullable=False),  # DeletionView
    Index(None, "finished_at"),
)

lease = Table(
    "lease",
    metadata,
    Column("num", Integer, primary_key=True, autoincrement=False),  # always 1: the only row, inserted by the migration
    Column("owner", String(255), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("session_owner", String(255), nullable=False, server_default=""),  # the owner that Database.announce knows
)


tokens = Table(
    "tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("name", String(63), nullable=False),
    Column("role", String(16), nullable=False),
    Column("projects", Text, nullable=True),  # JSON: a list of names; null: all
    Column("user", String(63), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
    Column("last_used_at", Double, nullable=True),
    Column("cluster", String(63), nullable=True),  # of the gateway that shows it; null: it is not one of a gateway
    Column("parent", String(16), nullable=True),  # id of the token that made it and that it ends with
    Column("personal", Boolean, nullable=False, server_default=false()),  # it may make others
)

sessions = Table(
    "sessions",
    metadata,
    Column("hash", String(64), primary_key=True),  # of the cookie, or of the code of a link
    Column("token_id", String(16), ForeignKey("tokens.id", ondelete="CASCADE"), nullable=True),  # null: a JWT's
    Column("principal", Text, nullable=False),  # JSON, of a JWT; else empty
    Column("is_link", Integer, nullable=False),  # 1: a code, which is exchanged once for a session
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index(None, "expires_at"),
)

audit = Table(
    "audit",
    metadata,
    Column("num", Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("actor", String(200), nullable=False),
    Column("role", String(16), nullable=False),
    Column("token_id", String(16), nullable=False),
    Column("address", String(64), nullable=False),
    Column("operation", String(200), nullable=False),  # method and route
    Column("path", Text, nullable=False),
    Column("job_id", String(64), nullable=False),
    Column("outcome", String(32), nullable=False),  # done, or the code of the problem
    Index(None, "at"),
    Index(None, "job_id", "num"),
    Index(None, "actor", "num"),
)


clusters = Table(
    "clusters",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("life", String(16), nullable=False),  # of the gateway that speaks for it; empty: none does
    Column("token_id", String(16), nullable=False),  # that this gateway has shown
    Column("report", BigInteger, nullable=False),  # number of its newest report
    Column("reported_at", Double, nullable=False),
    Column("address", Text, nullable=False),
    Column("error", Text, nullable=False),  # why Ray does not answer; empty: it does
    Column("snapshot", Text, nullable=False),  # JSON: ClusterSnapshot; empty: there is none of this life
    Column("snapshot_report", BigInteger, nullable=False),  # number of the report that it came with
    Column("last_order", BigInteger, nullable=False),  # number of the newest order
    Column("ray_cluster", String(64), nullable=False, server_default=""),  # id of the Ray cluster; empty: not known
    Column("labels", Text, nullable=False, server_default="{}"),  # JSON: str -> str, added to those of its nodes
    Column("cordon", Text, nullable=False, server_default=""),  # JSON: Cordon; empty: there is none
)

cluster_orders = Table(
    "cluster_orders",
    metadata,
    Column("cluster", String(63), ForeignKey("clusters.name", ondelete="CASCADE"), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("kind", String(63), nullable=False),
    Column("arguments", Text, nullable=False),  # JSON
    Column("archive", String(64), nullable=True),  # SHA-256 of the code archive that the gateway may read for it
    Column("created_at", Double, nullable=False),
    Column("answer", Text, nullable=True),  # JSON: Answer; null: there is none yet
    Column("answered_at", Double, nullable=True),
    PrimaryKeyConstraint("cluster", "number"),
    sqlite_with_rowid=False,
)


def _newest_of_job() -> Column[int]:
    foreign = ForeignKey("jobs.num", ondelete="CASCADE")
    return Column("job_num", BigInteger, foreign, primary_key=True, autoincrement=False)


attempt_tokens = Table(
    "attempt_tokens",
    metadata,
    _newest_of_job(),
    Column("attempt", Integer, nullable=False),
    Column("hash", String(64), nullable=False, unique=True),  # SHA-256 of the token, in hexadecimal digits
    Column("life", BigInteger, nullable=False),  # the highest of the supervisors that have reported; 0: none has
    Column("reported_at", Double, nullable=False),  # when the last report was stored; 0: none was
)

directives = Table(
    "directives",
    metadata,
    _newest_of_job(),
    Column("attempt", Integer, nullable=False),
    Column("number", BigInteger, nullable=False),  # rises with each directive of the attempt
    Column("epoch", BigInteger, nullable=False),  # lease epoch of the control plane that wrote it
    Column("body", Text, nullable=False),  # JSON: a Directive
    Column("stacks", Text, nullable=False),  # JSON: the newest StacksAnswer; empty: there is none
)

job_views = Table(
    "job_views",
    metadata,
    Column("project", String(63), nullable=False),
    Column("name", String(63), nullable=False),
    Column("document", Text, nullable=False),  # JSON: a TableView
    Column("saved_at", Double, nullable=False),
    Column("saved_by", String(200), nullable=False),
    PrimaryKeyConstraint("project", "name"),
)

model_versions = Table(
    "model_versions",
    metadata,
    Column("project", String(63), nullable=False),
    Column("name", String(63), nullable=False),
    Column("version", Integer, nullable=False),
    Column("job_id", String(32), nullable=False, index=True),  # no foreign key: it may outlive the job
    Column("checkpoint", String(100), nullable=False),
    Column("removed", Boolean, nullable=False, server_default=false()),  # its number is never given again
    Column("document", Text, nullable=False),  # JSON: a ModelVersion without its aliases
    PrimaryKeyConstraint("project", "name", "version"),
)

model_aliases = Table(
    "model_aliases",
    metadata,
    Column("project", String(63), nullable=False),
    Column("name", String(63), nullable=False),
    Column("alias", String(63), nullable=False),
    Column("version", Integer, nullable=False),
    PrimaryKeyConstraint("project", "name", "alias"),
)
