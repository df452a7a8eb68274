"""RetentionMethods: the methods of `Store` that delete jobs and what ended jobs leave. See `Store` for what they share.

Every method can be repeated, by any process, so none needs the lease.
"""

from __future__ import annotations

from collections.abc import Collection

from shoal_service.core.retention import EndedJob, Kind
from shoal_service.fleet_views import DeletionView
from shoal_service.store.database import Database
from shoal_service.store.hub import Hub
from shoal_service.store.retention import deletions, ended
from shoal_service.store.retention.deletions import DeletionRequest
from shoal_service.store.retention.ended import BEGINNING, Place


class RetentionMethods:
    """A part of `Store`."""

    _database: Database
    _hub: Hub

    def begin_deletion(self, job_id: str, request: DeletionRequest, *, now: float) -> DeletionView:
        """The job cannot begin again; `remove_job_rows` and `finish_deletion` complete it. Answers with the deletion
        that was begun before, if there is one. Raises JobNotFound, JobNotEnded."""
        with self._database.write() as tx:
            view = deletions.begin(tx, job_id, request, now=now)
        self._hub.publish(job_id)
        return view

    def deletion(self, job_id: str) -> DeletionView | None:
        with self._database.read() as tx:
            return deletions.find(tx, job_id)

    def deletions(
        self, *, project: str | None = None, limit: int = 100, visible: Collection[str] | None = None
    ) -> list[DeletionView]:
        """Newest first; `visible`: of jobs of these projects alone."""
        with self._database.read() as tx:
            return deletions.newest(tx, project=project, limit=limit, visible=visible)

    def unfinished_deletions(self, *, limit: int = 100) -> list[DeletionView]:
        """Oldest first."""
        with self._database.read() as tx:
            return deletions.unfinished(tx, limit=limit)

    def remove_job_rows(self, job_id: str) -> int:
        """A batch of the rows of a job that is being deleted; how many, 0: there are no more."""
        with self._database.write() as tx:
            return deletions.remove_rows(tx, job_id)

    def finish_deletion(self, job_id: str, *, now: float) -> DeletionView:
        """The job is gone. Raises JobNotFound: its deletion was never begun."""
        with self._database.write() as tx:
            view = deletions.finish(tx, job_id, now=now)
        self._hub.publish(job_id)
        return view

    def note_deletion_error(self, job_id: str, error: str) -> DeletionView:
        """Why the deletion of a job could not be continued. Raises JobNotFound: it was never begun."""
        with self._database.write() as tx:
            return deletions.note_error(tx, job_id, error)

    def ended_jobs(
        self, *, before: float, after: Place = BEGINNING, limit: int = 200
    ) -> tuple[list[EndedJob], Place | None]:
        """A page of the jobs that ended before that time, the first ones first; where the next page begins."""
        with self._database.read() as tx:
            return ended.page(tx, before=before, after=after, limit=limit)

    def remove_part(self, job_id: str, kind: Kind, *, reason: str, before: int, now: float) -> int:
        """A batch of an ended job's log, series or events; how many rows, 0: there are no more. `before`: how many the
        batches before have removed, for the event. Raises JobNotFound."""
        with self._database.write() as tx:
            removed = ended.remove_part(tx, job_id, kind, reason=reason, before=before, now=now)
        self._hub.publish(job_id)
        return removed

    def unused_archives(self, *, before: float, limit: int = 100) -> list[str]:
        """Archives that were last uploaded before that time and that the spec of no job names."""
        with self._database.read() as tx:
            return ended.unused_archives(tx, before=before, limit=limit)

    def remove_archive(self, sha256: str, *, before: float) -> bool:
        """False: it is used now, or was uploaded again."""
        with self._database.write() as tx:
            return ended.remove_archive(tx, sha256, before=before)
