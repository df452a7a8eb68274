"""`Store`: every job and its histories in SQLite or PostgreSQL; its transactions by topic, errors and migrations.
The control loop, the HTTP edge and `shoal doctor` call it; `reads/` holds the larger queries.
No other package uses SQL. The store never decides: core/job_machine.py and core/endings.py do.
"""

from shoal_service.store.driving import DriveRow
from shoal_service.store.errors import (
    Conflict,
    IdempotencyConflict,
    InvalidArchive,
    InvalidCursor,
    JobEnded,
    JobNotFound,
    LeaseLost,
    NotFound,
    PreconditionFailed,
    ProjectConflict,
    ProjectNotFound,
    QueueFull,
    RequestConflict,
    StoreError,
    StoreUnavailable,
    TokenNotFound,
    UserNotFound,
    WindowNotFound,
)
from shoal_service.store.hub import Subscription
from shoal_service.store.lease import Lease
from shoal_service.store.store import Store

__all__ = [
    "Conflict",
    "DriveRow",
    "IdempotencyConflict",
    "InvalidArchive",
    "InvalidCursor",
    "JobEnded",
    "JobNotFound",
    "Lease",
    "LeaseLost",
    "NotFound",
    "PreconditionFailed",
    "ProjectConflict",
    "ProjectNotFound",
    "QueueFull",
    "RequestConflict",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "Subscription",
    "TokenNotFound",
    "UserNotFound",
    "WindowNotFound",
]
