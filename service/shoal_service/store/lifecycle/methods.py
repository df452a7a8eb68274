"""LifecycleMethods: the methods of `Store` for jobs that go on. See `Store` for what they share."""

from __future__ import annotations

from shoal_service.store import submissions
from shoal_service.store.database import Database
from shoal_service.store.hub import Hub
from shoal_service.store.lifecycle import continuing, reopening
from shoal_service.views import JobPatch, JobView, WorkerPatch
from shoal_workers.contract.spec import JobSpec


class _RolledBack(Exception):
    def __init__(self, view: JobView) -> None:
        super().__init__(view)
        self.view = view


class LifecycleMethods:
    """A part of `Store`."""

    _database: Database
    _hub: Hub

    def try_job(self, spec: JobSpec, *, now: float, note: str = "") -> JobView:
        """What `create_job` would make, or raise; nothing is stored."""
        try:
            with self._database.write() as tx:
                raise _RolledBack(submissions.create(tx, spec, idempotency_key=None, now=now, note=note)[0])
        except _RolledBack as undone:
            return undone.view

    def extend_job(self, job_id: str, *, steps: int, now: float) -> JobView:
        """The job goes on to `steps` steps in all, in place; an ended one returns to the queue. Raises JobNotFound,
        LifecycleConflict, RequestConflict, QueueFull."""
        with self._database.write() as tx:
            view = reopening.extend(tx, job_id, steps=steps, now=now)
        self._hub.publish(job_id, is_request=True)
        return view

    def retry_job(self, job_id: str, *, now: float) -> JobView:
        """A failed job returns to the queue, and goes on from its newest checkpoint. Raises JobNotFound,
        LifecycleConflict, RequestConflict, QueueFull."""
        with self._database.write() as tx:
            view = reopening.retry(tx, job_id, now=now)
        self._hub.publish(job_id, is_request=True)
        return view

    def move_job(self, job_id: str, to: str, *, if_match: str | None = None, now: float) -> JobView:
        """The job shall run in the cluster `to`; `any`: in the one that the scheduler chooses. A new version of the
        spec, as `patch_job` makes it. The caller has checked that it can run there.

        Raises:
            JobNotFound, JobEnded, RequestConflict, PreconditionFailed
        """
        patch = JobPatch(worker=WorkerPatch(cluster=to))
        with self._database.write() as tx:
            view = submissions.patch(tx, job_id, patch, if_match=if_match, now=now)
        self._hub.publish(job_id, is_request=True)
        return view

    def needed_checkpoints(self, job_id: str) -> dict[str, list[str]]:
        """Names of this job's checkpoints that other jobs go on from and still need, with the ids of those jobs."""
        with self._database.read() as tx:
            return continuing.holders(tx, job_id)
