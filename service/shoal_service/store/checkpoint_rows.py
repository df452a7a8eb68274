"""Checkpoints of a job: what people do with them (pin, delete, note damage), and which other jobs still need them.

The rows themselves come from supervisors (store/reporting.py). A job that goes on from another job's checkpoint, and
has none of its own yet, holds that one (`jobs.held`): the hold ends with its first own checkpoint, or with the job. No
storage is touched here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, update

from shoal_service.core.events import CheckpointDamaged, CheckpointDeleted, CheckpointPinned, CheckpointUnpinned
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.lifecycle import NoSuchCheckpoint, choose
from shoal_service.core.retention import why_kept
from shoal_service.store.database import Transaction, checkpoints, jobs, model_versions
from shoal_service.store.edit import RELEASED, edit_job
from shoal_service.store.errors import (
    CheckpointConflict,
    CheckpointKept,
    CheckpointNotFound,
    JobNotFound,
    RequestConflict,
)
from shoal_service.store.records import JobRecord, load, load_spec, parse_pins, read_status
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract import CheckpointName, ContinueFrom, JobSpec, JobState
from shoal_workers.contract.checks.spec_errors import SpecError

FILES = "files"
"""What a script holds of another one, in the place of a checkpoint's name: all that it has left."""


def read_checkpoints(tx: Transaction, job_id: str, *, newest: int | None = None) -> list[CheckpointView]:
    """Read the checkpoints of a job, oldest first; of many only the `newest`. Raises JobNotFound."""
    of_job = select(jobs.c.num, jobs.c.pins, jobs.c.status).where(jobs.c.id == job_id)
    job = tx.require_row(of_job, JobNotFound(job_id))
    key = (checkpoints.c.step.desc(), checkpoints.c.attempt.desc(), checkpoints.c.generation.desc())
    query = select(checkpoints.c.document).where(checkpoints.c.job_num == job.num).order_by(*key).limit(newest)
    stored = [CheckpointView.model_validate_json(text) for text in tx.execute(query).scalars()]
    pins, standing = parse_pins(job.pins), read_status(job.status).best
    ranked = {} if standing is None else {score.step: (n, score.value) for n, score in enumerate(standing.best, 1)}
    return [checkpoint.model_copy(update=_make_marks(checkpoint, pins, ranked)) for checkpoint in reversed(stored)]


def read_committed(tx: Transaction, job_id: str) -> dict[CheckpointName, CheckpointView]:
    """Read the checkpoints of a job that are good, by name, oldest first. Raises JobNotFound."""
    return {
        CheckpointName(checkpoint.step, checkpoint.attempt, checkpoint.generation): checkpoint
        for checkpoint in read_checkpoints(tx, job_id)
        if checkpoint.state is CheckpointState.COMMITTED
    }


def newest(tx: Transaction, job_id: str) -> CheckpointName | None:
    """The newest good checkpoint of a job; None if it has none. Raises JobNotFound."""
    return max(read_committed(tx, job_id), default=None)


def pin(tx: Transaction, job_id: str, name: CheckpointName, *, is_pinned: bool, now: float) -> CheckpointView:
    """Pins or unpins a checkpoint. Retention does not delete it while it is pinned. Raises JobNotFound,
    CheckpointNotFound, CheckpointConflict; RequestConflict: the job is being deleted."""
    with edit_job(tx, job_id, now) as edit:
        job, view = edit.job, _find(tx, job_id, name)
        if job.deleting:
            raise RequestConflict(job_id, job.state, "change: it is being deleted")
        if is_pinned and view.state is not CheckpointState.COMMITTED:
            raise CheckpointConflict(job_id, str(name), view.state, "only a committed one can be pinned")
        if is_pinned != (str(name) in job.pins):
            pins = {*job.pins, str(name)} if is_pinned else {*job.pins} - {str(name)}
            edit.set(pins=json.dumps(sorted(pins)))
            if is_pinned:
                edit.event(CheckpointPinned(name=str(name), step=name.step))
            else:
                edit.event(CheckpointUnpinned(name=str(name), step=name.step))
    return view.model_copy(update={"pinned": is_pinned})


def check_deletion(tx: Transaction, job_id: str, name: CheckpointName) -> CheckpointView:
    """Finds the checkpoint, if it may be deleted. Raises JobNotFound, CheckpointNotFound, CheckpointConflict,
    CheckpointKept."""
    job = load(tx, job_id)
    return _require_deletable(tx, job, name, is_over=job.state.ended)


def newer_than(tx: Transaction, job_id: str, step: int) -> list[CheckpointName]:
    """The good checkpoints of later steps, newest first, if all of them may be deleted so that the job goes on from
    this step. Raises JobNotFound, RequestConflict, CheckpointNotFound, CheckpointKept."""
    job = load(tx, job_id)
    if job.state is JobState.QUEUED or job.state in ATTEMPT_STATES:
        raise RequestConflict(job_id, job.state, "go on from another checkpoint: pause it first")
    committed = sorted(read_committed(tx, job_id), reverse=True)
    if step and step not in {name.step for name in committed}:
        raise CheckpointNotFound(job_id, f"of step {step}")
    newer = [name for name in committed if name.step > step]
    for name in newer:
        _require_deletable(tx, job, name, is_over=True)
    return newer


def note_deletion(
    tx: Transaction, job_id: str, name: CheckpointName, *, now: float, reason: str = ""
) -> CheckpointView:
    """Notes that the storage does not have the checkpoint any more. `reason`: why, if no user asked. Raises
    JobNotFound, CheckpointNotFound."""
    with edit_job(tx, job_id, now) as edit:
        view = _find(tx, job_id, name)
        if view.state is CheckpointState.DELETED:
            return view  # retention was faster, or the request is repeated
        edit.event(CheckpointDeleted(name=str(name), step=name.step, reason=reason))
        left = [other.step for other in read_committed(tx, job_id) if other != name]
        if edit.status.checkpoint_step == name.step and name.step not in left:
            edit.describe(checkpoint_step=max(left, default=None))
        return _store(tx, edit.job, view.model_copy(update={"state": CheckpointState.DELETED, "pinned": False}))


def note_damage(tx: Transaction, job_id: str, name: CheckpointName, *, message: str, now: float) -> CheckpointView:
    """Notes that a verification has found damage. Ignored unless the checkpoint counts as good. Raises JobNotFound,
    CheckpointNotFound."""
    with edit_job(tx, job_id, now) as edit:
        view = _find(tx, job_id, name)
        if view.state is not CheckpointState.COMMITTED:
            return view
        edit.event(CheckpointDamaged(name=str(name), message=message))
        return _store(tx, edit.job, view.model_copy(update={"state": CheckpointState.DAMAGED, "message": message}))


def resolved(tx: Transaction, spec: JobSpec) -> JobSpec:
    """The spec with step, name and URL of the checkpoint that it goes on from; for a script, with the URL of the other
    script's directory, None in the server's own place for checkpoints.

    Raises:
        SpecError: there is no such job, or no such checkpoint.
    """
    wanted = spec.continue_from
    if wanted is None:
        return spec
    deleting = tx.execute(select(jobs.c.deleting).where(jobs.c.id == wanted.job)).scalar_one_or_none()
    if deleting is None:
        raise SpecError.at("continue_from.job", f"continue_from.job: {JobNotFound(wanted.job)}")
    if deleting:
        raise SpecError.at("continue_from.job", f"continue_from.job: job {wanted.job} is being deleted.")
    if spec.script is not None:
        return spec.model_copy(update={"continue_from": _choose_files(tx, wanted)})
    committed = read_committed(tx, wanted.job)
    try:
        chosen = choose(wanted, committed, spec.stop)
    except NoSuchCheckpoint as error:
        raise SpecError.at("continue_from", error.message) from None
    update = {"step": chosen.step, "checkpoint": str(chosen), "url": committed[chosen].url}
    return spec.model_copy(update={"continue_from": wanted.model_copy(update=update)})


def _choose_files(tx: Transaction, wanted: ContinueFrom) -> ContinueFrom:
    """The files that a script has left. Raises SpecError."""
    job = load(tx, wanted.job)
    spec = load_spec(tx, job.num, job.spec_version)
    if spec.script is None:
        message = (
            f"continue_from.job {wanted.job} is no script: its checkpoints are Shoal's, which a script cannot read. Go "
            "on with a job of the same kind, or give the script the file of `shoal export` in script.args."
        )
        raise SpecError.at("continue_from.job", message)
    if wanted.step is not None:
        message = (
            f"continue_from.step {wanted.step}: a script decides itself which of its files it loads. Leave the step "
            "out (--from JOB), and choose by script.args."
        )
        raise SpecError.at("continue_from.step", message)
    url = spec.checkpoint.url
    return wanted.model_copy(update={"checkpoint": None, "url": url and f"{url.rstrip('/')}/{wanted.job}"})


def hold_columns(spec: JobSpec) -> dict[str, str | None]:
    """The columns of a job's row that name the checkpoint of another job that it holds from now on."""
    origin = spec.continue_from
    if origin is not None and spec.script is not None:
        return {"held": f"{origin.job}/{FILES}"}
    if origin is None or origin.checkpoint is None:
        return RELEASED
    return {"held": f"{origin.job}/{origin.checkpoint}"}


def held(tx: Transaction) -> dict[str, tuple[str, ...]]:
    """Names of the checkpoints that other jobs still need, or that are versions of a model, sorted, by the id of their
    job."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for text in tx.execute(select(jobs.c.held).where(jobs.c.held.is_not(None))).scalars():
        job_id, _, name = text.partition("/")
        if name != FILES:  # of a script, which has no checkpoints
            names[job_id].add(name)
    for row in tx.execute(select(model_versions).where(~model_versions.c.removed)):
        names[row.job_id].add(row.checkpoint)
    return {job_id: tuple(sorted(checkpoint_names)) for job_id, checkpoint_names in names.items()}


def holders(tx: Transaction, job_id: str) -> dict[str, list[str]]:
    """Ids of the jobs that still need it, for each checkpoint of this job."""
    names_by_job: defaultdict[str, list[str]] = defaultdict(list)
    own_pins = jobs.c.held.startswith(f"{job_id}/", autoescape=True)
    for row in tx.execute(select(jobs.c.id, jobs.c.held).where(own_pins).order_by(jobs.c.num)):
        names_by_job[row.held.partition("/")[2]].append(row.id)
    return dict(names_by_job)


def registered(tx: Transaction, job_id: str) -> dict[str, str]:
    """The model and version for each checkpoint of this job that is registered."""
    own_versions = select(model_versions).where(model_versions.c.job_id == job_id, ~model_versions.c.removed)
    return {row.checkpoint: f"{row.name}@{row.version}" for row in tx.execute(own_versions)}


def _require_deletable(tx: Transaction, job: JobRecord, name: CheckpointName, *, is_over: bool) -> CheckpointView:
    view = _find(tx, job.id, name)
    if view.state not in (CheckpointState.COMMITTED, CheckpointState.DAMAGED):
        raise CheckpointConflict(job.id, str(name), view.state, "only one that is in the storage can be deleted")
    pinned = [parsed for pin in job.pins if (parsed := CheckpointName.parse(pin)) is not None]
    reason = why_kept(name, read_committed(tx, job.id), pinned=pinned, is_over=is_over)
    needed_by = holders(tx, job.id).get(str(name), [])
    if needed_by and not reason:
        reason = (
            f"job {needed_by[0]} goes on from it, and has no checkpoint of its own yet. Wait for that, or cancel that "
            "job"
        )
    model = registered(tx, job.id).get(str(name))
    if model is not None and not reason:
        reason = f"it is the model {model}; `shoal model remove {model}` takes it out of the registry"
    if reason:
        raise CheckpointKept(job.id, str(name), reason)
    return view


def _find(tx: Transaction, job_id: str, name: CheckpointName) -> CheckpointView:
    for view in read_checkpoints(tx, job_id):
        if view.name == str(name):
            return view
    raise CheckpointNotFound(job_id, str(name))


def _store(tx: Transaction, job: JobRecord, view: CheckpointView) -> CheckpointView:
    """Stores the row, of which pins and scores are not a part."""
    row: dict[str, Any] = {
        "state": view.state.value,
        "document": view.model_copy(update={"pinned": False, "best": None, "score": None}).model_dump_json(),
    }
    key = (
        checkpoints.c.job_num == job.num,
        checkpoints.c.step == view.step,
        checkpoints.c.attempt == view.attempt,
        checkpoints.c.generation == view.generation,
    )
    tx.execute(update(checkpoints).where(*key).values(row))
    return view


def _make_marks(
    checkpoint: CheckpointView, pins: Sequence[str], ranked: Mapping[int, tuple[int, float]]
) -> dict[str, bool | int | float]:
    """Return what is not a part of the row of a checkpoint: that it is pinned, and its rank among the best."""
    marks: dict[str, bool | int | float] = {"pinned": True} if checkpoint.name in pins else {}
    if checkpoint.state is CheckpointState.COMMITTED and checkpoint.step in ranked:
        rank, value = ranked[checkpoint.step]
        marks |= {"best": rank, "score": value}
    return marks
