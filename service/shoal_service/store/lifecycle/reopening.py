"""Jobs that go on in place: to more steps, or after a failure. Functions of an open transaction."""

from __future__ import annotations

from sqlalchemy import Connection
from sqlalchemy import insert as plain_insert

from shoal_service.core.events.base import JobEvent
from shoal_service.core.events.job import JobExtended, JobRetried
from shoal_service.core.job_machine import Reopened, step
from shoal_service.core.lifecycle import Answer, Training, extension, retrial
from shoal_service.store.access import audit
from shoal_service.store.edit import JobEdit
from shoal_service.store.errors import LifecycleConflict, RequestConflict
from shoal_service.store.lifecycle import continuing
from shoal_service.store.reads.history import read_checkpoints
from shoal_service.store.records import JobRecord, load, load_view, read_spec
from shoal_service.store.scheduling import projects, users
from shoal_service.store.tables import job_specs
from shoal_service.views import CheckpointState, JobView
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec, StopSpec


def extend(connection: Connection, job_id: str, *, steps: int, now: float) -> JobView:
    """The job goes on to `steps` steps in all. Raises JobNotFound, RequestConflict, LifecycleConflict, QueueFull."""
    job = load(connection, job_id, lock=True)
    if job.state is JobState.CANCELLING:
        raise RequestConflict(job_id, job.state, "be extended")
    spec = _readable(connection, job)
    answer = _granted(job, extension(_training(connection, job, spec), steps))
    after = spec.model_copy(update={"stop": StopSpec(steps=steps)})
    version = job.spec_version + 1
    row = {"job_num": job.num, "version": version, "accepted_at": now, "document": after.model_dump_json()}
    connection.execute(plain_insert(job_specs), row)
    edit = JobEdit(connection, job, now)
    edit.set(spec_version=version)
    event = JobExtended(spec_version=version, steps=steps, done=job.status.step, reopened=answer.reopens, **audit.by())
    if answer.reopens:
        _reopen(edit, after, event, "Extended on request.")
    else:
        edit.event(event)
        edit.save()
    return load_view(connection, job_id)


def retry(connection: Connection, job_id: str, *, now: float) -> JobView:
    """A failed job tries again in place. Raises JobNotFound, LifecycleConflict, RequestConflict, QueueFull."""
    job = load(connection, job_id, lock=True)
    spec = _readable(connection, job)
    _granted(job, retrial(_training(connection, job, spec)))
    edit = JobEdit(connection, job, now)
    retried = JobRetried(done=job.status.step, reason=job.status.reason, **audit.by())
    _reopen(edit, spec, retried, "Tried again on request.")
    return load_view(connection, job_id)


def _reopen(edit: JobEdit, spec: JobSpec, event: JobEvent, message: str) -> None:
    job = edit.job
    standing = step(job.standing, Reopened())
    assert standing is not None, "only an ended job is reopened"
    edit.event(event)
    best = job.status.best
    if best is not None:
        edit.describe(best=best.model_copy(update={"num_since": 0}))  # it may have stopped early
    edit.move(standing, "requested", message)
    edit.set(ended_at=None, failures=0, failure_step=job.status.step, failure=None)
    if job.status.checkpoint_step is None:
        edit.set(**continuing.columns(spec))
    edit.save()
    projects.require_room_in_queue(edit.connection, spec.project)
    users.require_room_in_queue(edit.connection, spec.user)


def _readable(connection: Connection, job: JobRecord) -> JobSpec:
    stored = read_spec(connection, job.num, job.spec_version)
    if stored.problem:
        raise RequestConflict(job.id, job.state, f"go on: its stored spec cannot be read ({stored.problem})")
    return stored.value


def _training(connection: Connection, job: JobRecord, spec: JobSpec) -> Training:
    own = any(one.state is CheckpointState.COMMITTED for one in read_checkpoints(connection, job.id))
    has_origin = spec.continue_from is not None
    return Training(state=job.state, step=job.status.step, stop=spec.stop, has_checkpoint=own or has_origin)


def _granted(job: JobRecord, answer: Answer) -> Answer:
    if answer.problem:
        raise LifecycleConflict(job.id, job.state, answer.problem)
    return answer
