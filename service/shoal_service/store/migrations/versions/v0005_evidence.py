"""A suspicion names every job that shares it: a node is on probation if two do, or if it failed a test.

Suspicions that are stored become those of the job that had them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("node_suspicions", sa.Column("job_ids", sa.Text, nullable=False, server_default="[]"))
    op.add_column("node_suspicions", sa.Column("avoided_until", sa.Double, nullable=False, server_default="0"))
    op.execute("""UPDATE node_suspicions SET job_ids = '["' || job_id || '"]', avoided_until = next_test_at""")
