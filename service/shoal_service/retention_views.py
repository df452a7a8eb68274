"""The resources of the REST API about deletions of jobs and about what retention removes. Pure data, as in `views`."""

from __future__ import annotations

from shoal_service.core.retention.ended_jobs import Kind
from shoal_workers.contract.base import Frozen


class DeletionView(Frozen):
    """The deletion of a job; it stays when the job is gone, as a record of it."""

    job_id: str
    name: str
    project: str
    user: str
    requested_at: float
    requested_by: str = ""
    """Who asked for it; empty: not known."""
    reason: str = ""
    """Why, if retention deletes the job."""
    with_checkpoints: bool = True
    """Its files in the storage are deleted too."""
    root: str = ""
    """The job's directory in the storage; empty: it is not known."""
    kept: tuple[str, ...] = ()
    """URLs of checkpoints that stay in the storage, because they are pinned or another job needs them."""
    rows: int = 0
    """Deleted from the database so far: events, lines of the log, points of the series."""
    finished_at: float | None = None
    """null: it is not complete, and is continued."""
    error: str = ""
    """Why the last try to continue it failed."""


class RemovalView(Frozen):
    """One thing that retention deletes."""

    kind: Kind
    job_id: str = ""
    name: str = ""
    """Name of the job, the checkpoint or the archive."""
    reason: str = ""
    rows: int = 0
    """Deleted from the database; 0 in a dry run."""
    error: str = ""
    """Why it could not be deleted; it is tried again in the next round."""


class GcView(Frozen):
    """One round of retention."""

    dry_run: bool
    removals: tuple[RemovalView, ...] = ()
    """What was deleted, or with `dry_run` would be."""
    is_complete: bool = True
    """False: more can be deleted; ask again."""
