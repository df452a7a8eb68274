"""Jobs that go on from a checkpoint of another job: which one, and for how long it must stay in the storage.

A job that has no checkpoint of its own yet holds the one that it goes on from (`jobs.held`). The
hold ends with its first own checkpoint, or with the job.
"""

from __future__ import annotations

from collections import defaultdict

from sqlalchemy import Connection, select

from shoal_service.core.lifecycle import NoSuchCheckpoint, choose
from shoal_service.store.errors import JobNotFound
from shoal_service.store.reads.history import read_checkpoints
from shoal_service.store.tables import jobs
from shoal_service.views import CheckpointState
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.spec import JobSpec


def resolved(connection: Connection, spec: JobSpec) -> JobSpec:
    """The spec with step, name and URL of the checkpoint that it goes on from.

    Raises:
        SpecError: there is no such job, or no such checkpoint.
    """
    wanted = spec.continue_from
    if wanted is None:
        return spec
    if connection.execute(select(jobs.c.deleting).where(jobs.c.id == wanted.job)).scalar_one_or_none():
        raise _refused("continue_from.job", f"continue_from.job: job {wanted.job} is being deleted.")
    try:
        found = [one for one in read_checkpoints(connection, wanted.job) if one.state is CheckpointState.COMMITTED]
    except JobNotFound as error:
        raise _refused("continue_from.job", f"continue_from.job: {error}") from None
    by_name = {CheckpointName(one.step, one.attempt, one.generation): one for one in found}
    try:
        chosen = choose(wanted, by_name, spec.stop)
    except NoSuchCheckpoint as error:
        raise _refused("continue_from", error.message) from None
    update = {"step": chosen.step, "checkpoint": str(chosen), "url": by_name[chosen].url}
    return spec.model_copy(update={"continue_from": wanted.model_copy(update=update)})


def columns(spec: JobSpec) -> dict[str, str | None]:
    """Columns of a job's row: the checkpoint of another job that it holds from now on."""
    origin = spec.continue_from
    if origin is None or origin.checkpoint is None:
        return RELEASED
    return {"held": f"{origin.job}/{origin.checkpoint}"}


RELEASED: dict[str, str | None] = {"held": None}
"""Columns of a job's row that needs no checkpoint of another job any more."""


def held(connection: Connection) -> dict[str, tuple[str, ...]]:
    """By job id: the names of its checkpoints that other jobs still need, sorted."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for text in connection.execute(select(jobs.c.held).where(jobs.c.held.is_not(None))).scalars():
        job_id, _, name = text.partition("/")
        names[job_id].add(name)
    return {job_id: tuple(sorted(found)) for job_id, found in names.items()}


def holders(connection: Connection, job_id: str) -> dict[str, list[str]]:
    """By checkpoint of this job: the ids of the jobs that still need it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    own = jobs.c.held.startswith(f"{job_id}/", autoescape=True)
    for row in connection.execute(select(jobs.c.id, jobs.c.held).where(own).order_by(jobs.c.num)):
        found[row.held.partition("/")[2]].append(row.id)
    return dict(found)


def _refused(path: str, message: str) -> SpecError:
    return SpecError((SpecProblem(path=path, message=message),))
