"""Workers are called workers, and snapshots snapshots, in what is stored.

    shard_id, shard_ids      worker_id, worker_ids    log lines, workers, incidents, events
    shard_died               worker_died              incident cause
    memory_lost              snapshot_lost            incident cause
    memory.recalled          snapshot.recovering      event type
    was                      reason                   field of the event node.cleared

Stored JSON is text. Each replaced word includes its quotation marks: inside a JSON string they would be escaped, so
nothing that a user wrote is changed.
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_WORDS = {
    '"shard_id"': '"worker_id"',
    '"shard_ids"': '"worker_ids"',
    '"shard_died"': '"worker_died"',
    '"memory_lost"': '"snapshot_lost"',
}
_DOCUMENTS = (("jobs", "status"), ("jobs", "workers"), ("events", "data"), ("incidents", "document"))


def upgrade() -> None:
    op.execute("ALTER TABLE logs RENAME COLUMN shard_id TO worker_id")
    op.execute("UPDATE incidents SET cause = 'worker_died' WHERE cause = 'shard_died'")
    op.execute("UPDATE incidents SET cause = 'snapshot_lost' WHERE cause = 'memory_lost'")
    op.execute("UPDATE events SET type = 'snapshot.recovering' WHERE type = 'memory.recalled'")
    op.execute("""UPDATE events SET data = REPLACE(data, '"was"', '"reason"') WHERE type = 'node.cleared'""")
    for table, column in _DOCUMENTS:
        for old, new in _WORDS.items():
            op.execute(
                f"UPDATE {table} SET {column} = REPLACE({column}, '{old}', '{new}') WHERE {column} LIKE '%{old}%'"
            )
