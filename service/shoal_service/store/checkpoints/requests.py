"""Writes of people about the checkpoints of a job, as functions of an open transaction."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, update

from shoal_service.core.events.training import (
    CheckpointDamaged,
    CheckpointDeleted,
    CheckpointPinned,
    CheckpointUnpinned,
)
from shoal_service.core.retention import why_kept
from shoal_service.store.edit import JobEdit
from shoal_service.store.errors import CheckpointConflict, CheckpointKept, CheckpointNotFound, RequestConflict
from shoal_service.store.lifecycle import continuing
from shoal_service.store.reads.history import read_checkpoints
from shoal_service.store.records import JobRecord, load
from shoal_service.store.tables import checkpoints
from shoal_service.views import CheckpointState, CheckpointView
from shoal_workers.contract.marker import CheckpointName


def pin(connection: Connection, job_id: str, name: CheckpointName, *, is_pinned: bool, now: float) -> CheckpointView:
    """Retention does not delete the checkpoint while it is pinned. Raises JobNotFound, CheckpointNotFound,
    CheckpointConflict; RequestConflict: the job is being deleted."""
    job = load(connection, job_id, lock=True)
    view = _find(connection, job_id, name)
    if job.deleting:
        raise RequestConflict(job_id, job.state, "change: it is being deleted")
    if is_pinned and view.state is not CheckpointState.COMMITTED:
        raise CheckpointConflict(job_id, str(name), view.state, "only a committed one can be pinned")
    if is_pinned != (str(name) in job.pins):
        pins = {*job.pins, str(name)} if is_pinned else {*job.pins} - {str(name)}
        edit = JobEdit(connection, job, now)
        edit.set(pins=json.dumps(sorted(pins)))
        step = name.step
        edit.event(
            CheckpointPinned(name=str(name), step=step) if is_pinned else CheckpointUnpinned(name=str(name), step=step)
        )
        edit.save()
    return view.model_copy(update={"pinned": is_pinned})


def check_deletion(connection: Connection, job_id: str, name: CheckpointName) -> CheckpointView:
    """The checkpoint, if it may be deleted. Raises JobNotFound, CheckpointNotFound, CheckpointConflict,
    CheckpointKept."""
    return _deletable(connection, load(connection, job_id), name)


def note_deletion(
    connection: Connection, job_id: str, name: CheckpointName, *, now: float, reason: str = ""
) -> CheckpointView:
    """The storage does not have it any more; `reason`: why, if no user asked. Raises JobNotFound,
    CheckpointNotFound."""
    job = load(connection, job_id, lock=True)
    view = _find(connection, job_id, name)
    if view.state is CheckpointState.DELETED:
        return view  # retention was faster, or the request is repeated
    edit = JobEdit(connection, job, now)
    edit.event(CheckpointDeleted(name=str(name), step=name.step, reason=reason))
    left = [one.step for one in _committed(connection, job_id) if one != name]
    if edit.status.checkpoint_step == name.step and name.step not in left:
        edit.describe(checkpoint_step=max(left, default=None))
    edit.save()
    return _store(connection, job, view.model_copy(update={"state": CheckpointState.DELETED, "pinned": False}))


def note_damage(
    connection: Connection, job_id: str, name: CheckpointName, *, message: str, now: float
) -> CheckpointView:
    """A verification has found damage. Ignored unless the checkpoint counts as good. Raises JobNotFound,
    CheckpointNotFound."""
    job = load(connection, job_id, lock=True)
    view = _find(connection, job_id, name)
    if view.state is not CheckpointState.COMMITTED:
        return view
    edit = JobEdit(connection, job, now)
    edit.event(CheckpointDamaged(name=str(name), message=message))
    edit.save()
    return _store(connection, job, view.model_copy(update={"state": CheckpointState.DAMAGED, "message": message}))


def _deletable(connection: Connection, job: JobRecord, name: CheckpointName) -> CheckpointView:
    view = _find(connection, job.id, name)
    if view.state not in (CheckpointState.COMMITTED, CheckpointState.DAMAGED):
        raise CheckpointConflict(job.id, str(name), view.state, "only one that is in the storage can be deleted")
    pinned = [parsed for pin in job.pins if (parsed := CheckpointName.parse(pin)) is not None]
    reason = why_kept(name, _committed(connection, job.id), pinned=pinned, is_over=job.state.ended)
    needed_by = continuing.holders(connection, job.id).get(str(name), [])
    if needed_by and not reason:
        reason = (
            f"job {needed_by[0]} goes on from it, and has no checkpoint of its own yet. Wait for that, or cancel that "
            "job"
        )
    if reason:
        raise CheckpointKept(job.id, str(name), reason)
    return view


def _find(connection: Connection, job_id: str, name: CheckpointName) -> CheckpointView:
    for view in read_checkpoints(connection, job_id):
        if view.name == str(name):
            return view
    raise CheckpointNotFound(job_id, str(name))


def _committed(connection: Connection, job_id: str) -> list[CheckpointName]:
    return [
        CheckpointName(one.step, one.attempt, one.generation)
        for one in read_checkpoints(connection, job_id)
        if one.state is CheckpointState.COMMITTED
    ]


def _store(connection: Connection, job: JobRecord, view: CheckpointView) -> CheckpointView:
    """Pins and scores are not a part of the row."""
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
    connection.execute(update(checkpoints).where(*key).values(row))
    return view
