"""Versions of a job's code in its spec: what may be changed, and the return to the code before when the supervisor has
refused a version or rolled it back. Functions of an open transaction.
"""

from __future__ import annotations

from sqlalchemy import insert, select

from shoal_service.core.events.job import CodeRefused, CodeRolledBack
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.reports import PendingEvent
from shoal_service.store.edit import JobEdit
from shoal_service.store.errors import RequestConflict
from shoal_service.store.records import JobRecord, read_spec
from shoal_service.store.tables import job_specs
from shoal_workers.contract.spec import JobSpec

_TAKEN_BACK = (CodeRefused.type, CodeRolledBack.type)


def require_changeable(job: JobRecord, before: JobSpec, after: JobSpec) -> None:
    """Raises RequestConflict. A GPU cannot be held by two workers, so those with new code could not start beside the
    others."""
    if after.code == before.code:
        return
    if before.worker.gpus and job.state in ATTEMPT_STATES:
        ways = "be given new code while its workers hold GPUs. Pause it, change the code, and resume it"
        raise RequestConflict(job.id, job.state, ways)
    if before.code.archive is None and before.code.working_dir is None:
        raise RequestConflict(job.id, job.state, f"be given code: its task {before.task} is not from code of its own")


def follow(edit: JobEdit, event: PendingEvent) -> None:
    """If the supervisor has gone back to the code before, so does the spec, unless another version was requested since:
    the next attempt must not begin with code that has failed."""
    if event.type not in _TAKEN_BACK:
        return
    job, connection = edit.job, edit.connection
    newest = edit.spec_version
    stored = read_spec(connection, job.num, newest)
    if stored.problem or stored.value.code.archive != event.data.get("version"):
        return
    versions = select(job_specs.c.version).where(job_specs.c.job_num == job.num, job_specs.c.version < newest)
    for version in connection.execute(versions.order_by(job_specs.c.version.desc())).scalars():
        earlier = read_spec(connection, job.num, version)
        if not earlier.problem and (earlier.value.code.archive or "") == event.data.get("before"):
            spec = stored.value.model_copy(update={"code": earlier.value.code})
            row = {"job_num": job.num, "version": newest + 1, "accepted_at": edit.now}
            connection.execute(insert(job_specs), row | {"document": spec.model_dump_json()})
            edit.set(spec_version=newest + 1)
            return
