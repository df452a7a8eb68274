"""Every job and its histories in SQLite or PostgreSQL. `Store` opens transactions; the other modules of this folder are
areas, of functions that take a transaction first.

The control loop, the HTTP edge and `shoal doctor` call it. No other package uses SQL. The store never decides:
core/job_machine.py and core/endings.py do.
"""

from shoal_service.store.database import Transaction
from shoal_service.store.driving import DriveRow
from shoal_service.store.errors import (
    CheckpointConflict,
    CheckpointKept,
    CheckpointNotFound,
    ClusterConflict,
    ClusterNotFound,
    Conflict,
    GatewayRefused,
    IdempotencyConflict,
    InvalidArchive,
    InvalidCursor,
    JobEnded,
    JobNotFound,
    LeaseLost,
    MoveRefused,
    NotFound,
    PreconditionFailed,
    ProfileNotFound,
    ProfileOpen,
    ProjectConflict,
    ProjectNotFound,
    QueueFull,
    RequestConflict,
    StoreError,
    StoreUnavailable,
    SweepConflict,
    SweepNotFound,
    TokenNotFound,
    UserNotFound,
)
from shoal_service.store.hub import Subscription, Topic
from shoal_service.store.lease import Lease
from shoal_service.store.store import Store

__all__ = [
    "CheckpointConflict",
    "CheckpointKept",
    "CheckpointNotFound",
    "ClusterConflict",
    "ClusterNotFound",
    "Conflict",
    "DriveRow",
    "GatewayRefused",
    "IdempotencyConflict",
    "InvalidArchive",
    "InvalidCursor",
    "JobEnded",
    "JobNotFound",
    "Lease",
    "LeaseLost",
    "MoveRefused",
    "NotFound",
    "PreconditionFailed",
    "ProfileNotFound",
    "ProfileOpen",
    "ProjectConflict",
    "ProjectNotFound",
    "QueueFull",
    "RequestConflict",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "Subscription",
    "SweepConflict",
    "SweepNotFound",
    "TokenNotFound",
    "Topic",
    "Transaction",
    "UserNotFound",
]
