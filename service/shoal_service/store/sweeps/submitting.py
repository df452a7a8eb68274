"""All jobs of a sweep at once: submitted, or cancelled. Functions of an open transaction, called by `SweepMethods`."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from shoal_service.core.desired import Desired
from shoal_service.store import submissions
from shoal_service.store.access import audit
from shoal_service.store.errors import IdempotencyConflict, JobEnded, QueueFull, SweepConflict, SweepTooLarge
from shoal_service.store.sweeps import reads
from shoal_workers.contract.spec import JobSpec


def create(
    connection: Connection, name: str, jobs: Sequence[tuple[JobSpec, str]], *, now: float
) -> list[tuple[str, bool]]:
    """Ids, and which are new: a job has a key of project, sweep and number. Raises SweepConflict, SweepTooLarge."""
    found = []
    for number, (spec, note) in enumerate(jobs, 1):
        key = f"sweep/{spec.project}/{name}/{number}"
        try:
            view, created = submissions.create(connection, spec, idempotency_key=key, now=now, note=note)
        except IdempotencyConflict as error:
            raise SweepConflict(spec.project, name, number, error.job_id) from None
        except QueueFull as error:
            raise SweepTooLarge(error.name, error.queued, error.max_queued, error.is_user) from None
        found.append((view.id, created))
    audit.made(f"/v1/sweeps/{jobs[0][0].project}/{name}")
    return found


def cancel(connection: Connection, project: str, name: str, *, now: float) -> list[str]:
    """The ids of the jobs that had neither ended nor been cancelled. Raises SweepNotFound."""
    cancelled = []
    for job_id in reads.job_ids(connection, project, name):
        try:
            _, changed = submissions.request(connection, job_id, Desired.CANCEL, now=now)
        except JobEnded:
            continue
        if changed:
            cancelled.append(job_id)
    return cancelled
