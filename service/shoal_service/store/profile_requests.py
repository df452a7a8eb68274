"""Profiles of a job: requests, how they ended, and their views. A job has at most one open request.

The open request is a column of the job's row, which the driver passes on; its view is a row of `profiles`. No trace is
read here.
"""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import delete, func, select

from shoal_service.core.events.job import ProfileFailed, ProfileRequested, ProfileTaken
from shoal_service.core.job_machine import ACTIVE
from shoal_service.store.database import Transaction, upsert
from shoal_service.store.edit import JobEdit
from shoal_service.store.errors import JobEnded, ProfileNotFound, ProfileOpen, RequestConflict
from shoal_service.store.records import load, num_of
from shoal_service.store.tables import profiles
from shoal_service.views import ProfileBody, ProfileState, ProfileView
from shoal_workers.contract.profiles import KEPT_PROFILES, Profiled, ProfileRequest

UNANSWERED_S = 900.0
"""An open request that is older than this is given up when the next one comes, because no supervisor answers it."""
_WORDS = "be profiled; only a job with workers can"


def create(tx: Transaction, job_id: str, body: ProfileBody, *, now: float) -> ProfileView:
    """Makes a request for a profile. Raises JobNotFound, RequestConflict (JobEnded), ProfileOpen."""
    job = load(tx, job_id, lock=True)
    if job.state.ended:
        raise JobEnded(job_id, job.state, "be profiled")
    if job.state not in ACTIVE:
        raise RequestConflict(job_id, job.state, _WORDS)
    edit = JobEdit(tx, job, now)
    if job.profile is not None:
        if now - job.profile.requested_at < UNANSWERED_S:
            raise ProfileOpen(job_id, job.profile.number, job.profile.rank)
        end_open(edit, f"no answer within {UNANSWERED_S:g} s")
    newest = tx.execute(select(func.max(profiles.c.number)).where(profiles.c.job_num == job.num)).scalar_one()
    request = ProfileRequest(number=(newest or 0) + 1, rank=body.rank, steps=body.steps, requested_at=now)
    view = ProfileView(
        number=request.number,
        state=ProfileState.REQUESTED,
        rank=body.rank,
        steps=body.steps,
        requested_at=now,
        attempt=job.attempt,
    )
    _write(tx, job.num, view)
    tx.execute(
        delete(profiles).where(profiles.c.job_num == job.num, profiles.c.number <= request.number - KEPT_PROFILES)
    )
    edit.set(profile=request.model_dump_json())
    edit.event(ProfileRequested(number=request.number, rank=request.rank, steps=request.steps))
    edit.save()
    tx.publish(job_id)
    return view


def views(tx: Transaction, job_id: str) -> list[ProfileView]:
    """The profiles of a job, oldest first. Raises JobNotFound."""
    query = select(profiles.c.document).where(profiles.c.job_num == num_of(tx, job_id)).order_by(profiles.c.number)
    return [ProfileView.model_validate_json(document) for document in tx.execute(query).scalars()]


def view(tx: Transaction, job_id: str, number: int) -> ProfileView:
    """One profile of a job. Raises JobNotFound, ProfileNotFound."""
    for request in views(tx, job_id):
        if request.number == number:
            return request
    raise ProfileNotFound(job_id, number)


def end(edit: JobEdit, item: Profiled) -> None:
    """Stores how a request has ended, as a supervisor reports it. Ignored unless the request is the open one."""
    request = edit.job.profile
    if request is None or request.number != item.number:
        return
    ended = {
        "state": ProfileState.FAILED if item.error else ProfileState.DONE,
        "ended_at": edit.now,
        "generation": item.generation or None,
        "reason": item.error,
        "note": item.note,
        "times": item.times,
        "files": item.files,
        "peak_bytes": item.peak_bytes,
        "held_s": item.held_s,
    }
    view = _of_request(edit, request).model_copy(update=ended)
    _write(edit.tx, edit.job.num, view)
    edit.set(profile="")
    edit.job = replace(edit.job, profile=None)
    if item.error or not item.times:
        edit.event(ProfileFailed(number=item.number, rank=item.rank, reason=item.error or "it has no step"))
        return
    edit.event(
        ProfileTaken(
            number=item.number,
            rank=item.rank,
            first_step=item.times[0].step,
            last_step=item.times[-1].step,
            step_s=view.step_s,
            held_s=item.held_s,
        )
    )


def end_open(edit: JobEdit, reason: str) -> None:
    """Ends the open request, if there is one, without a result."""
    request = edit.job.profile
    if request is not None:
        end(edit, Profiled(generation=0, number=request.number, rank=request.rank, error=reason))


def _of_request(edit: JobEdit, request: ProfileRequest) -> ProfileView:
    return ProfileView(
        number=request.number,
        state=ProfileState.REQUESTED,
        rank=request.rank,
        steps=request.steps,
        requested_at=request.requested_at,
        attempt=edit.job.attempt,
    )


def _write(tx: Transaction, job_num: int, view: ProfileView) -> None:
    row = {"job_num": job_num, "number": view.number, "document": view.model_dump_json()}
    upsert(tx, profiles, [row])
