"""The store of jobs, and what it raises. The only package that speaks SQL."""

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
    RequestConflict,
    StoreError,
    StoreUnavailable,
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
    "RequestConflict",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "Subscription",
]
