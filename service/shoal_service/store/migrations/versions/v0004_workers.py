"""`shard_id`, `shard_ids` and `shard_died` become `worker_id`, `worker_ids` and `worker_died`; `memory_lost` becomes
`snapshot_lost`.

Stored JSON is text, and the quotation marks belong to what is replaced: inside a JSON string they would be escaped, so
nothing that a user wrote is touched.
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
    for table, column in _DOCUMENTS:
        for old, new in _WORDS.items():
            op.execute(
                f"UPDATE {table} SET {column} = REPLACE({column}, '{old}', '{new}') WHERE {column} LIKE '%{old}%'"
            )
