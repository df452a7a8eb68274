"""Routes that let a job go on: in place, to more steps or after a failure; or in another cluster; and those that
archive one that has ended. A new job that goes on from another one's checkpoint is submitted with `continue_from`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.conditional import job_response, spec_tags
from shoal_api.http.context import Context
from shoal_api.http.documents import body
from shoal_api.http.json_router import AppContext, Job, JsonRouter, Writing
from shoal_api.http.parameters import IfMatch, JobId
from shoal_api.http.routes.checkpoints import DELETE_S
from shoal_service.core.access import Permission
from shoal_service.core.desired import Desired
from shoal_service.store import JobEnded, JobNotFound, PreconditionFailed, RequestConflict, checkpoint_rows, submissions
from shoal_service.store.errors import ClusterNotFound, MoveRefused
from shoal_service.views import ExtendRequest, JobView, MoveRequest, TakeRequest
from shoal_workers.contract.placing import ANY_CLUSTER

router = JsonRouter("/v1/jobs/{job_id}", "jobs", raises=[JobNotFound, JobEnded, RequestConflict])


@router.route("POST /cancel", Permission.JOBS_CHANGE, "Cancel a job", answer=JobView, status=202)
def cancel_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """This cannot be undone. Checkpoints are kept."""
    return job_response(submissions.request(tx, job_id, Desired.CANCEL, now=context.clock()), 202)


@router.route("POST /pause", Permission.JOBS_CHANGE, "Pause a job", answer=JobView, status=202)
def pause_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """The job writes a checkpoint, and its workers end."""
    return job_response(submissions.request(tx, job_id, Desired.PAUSE, now=context.clock()), 202)


@router.route("POST /resume", Permission.JOBS_CHANGE, "Resume a paused job", answer=JobView, status=202)
def resume_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """The job returns to the queue and continues from its checkpoint."""
    return job_response(submissions.request(tx, job_id, Desired.RUN, now=context.clock()), 202)


@router.route("POST /extend", Permission.JOBS_CHANGE, "Let a job go on to more steps", answer=JobView, status=202)
def extend_job(
    tx: Writing,
    context: AppContext,
    job_id: JobId,
    end: Annotated[ExtendRequest, body(ExtendRequest, {"steps": 2000})],
) -> Response:
    """The same job goes on in place, with its history and its checkpoints. A running job gets its new end at the
    next step boundary; an ended one returns to the queue and goes on from its newest checkpoint. The learning rate
    follows `schedule`, whose decay ends with the new last step unless `schedule.steps` says otherwise."""
    return job_response(submissions.extend(tx, job_id, steps=end.steps, now=context.clock()), 202)


@router.route("POST /retry", Permission.JOBS_CHANGE, "Let a failed job try again", answer=JobView, status=202)
def retry_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """The job returns to the queue in place, goes on from its newest checkpoint, and has its retry budget again."""
    return job_response(submissions.retry(tx, job_id, now=context.clock()), 202)


@router.route("POST /take", Permission.JOBS_CHANGE, "Let a job go on from an older checkpoint", answer=JobView)
async def take_checkpoint(
    context: AppContext, job_id: JobId, take: Annotated[TakeRequest, body(TakeRequest, {"step": 1200})], job: Job
) -> Response:
    """Deletes the good checkpoints of later steps, from the storage too, which cannot be undone. The job goes on
    from this step when it is resumed or tried again; with step 0 it starts over. Refused for a job that is queued
    or has workers, and if one of these checkpoints is pinned or needed."""
    store, reason = context.store, f"the job goes on from step {take.step} on request"
    catalog = context.storage.catalog(job)
    for name in await run_in_threadpool(store.reading(checkpoint_rows.newer_than), job_id, take.step):
        await context.storage.run(partial(catalog.delete, name), within_s=DELETE_S)
        note = partial(store.writing(checkpoint_rows.note_deletion), now=context.clock(), reason=reason)
        await run_in_threadpool(note, job_id, name)
    return job_response(await run_in_threadpool(store.get_job, job_id))


@router.route("POST /archive", Permission.JOBS_CHANGE, "Archive a job that has ended", answer=JobView)
def archive_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """Lists leave the job out unless they are asked for archived ones. Nothing of it is deleted, and it returns to
    the lists if it goes on."""
    return job_response(submissions.archive(tx, job_id, True, now=context.clock()))


@router.route("POST /unarchive", Permission.JOBS_CHANGE, "Take a job back into the lists", answer=JobView)
def unarchive_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """The opposite of `/archive`."""
    return job_response(submissions.archive(tx, job_id, False, now=context.clock()))


@router.route(
    "POST /move",
    Permission.JOBS_CHANGE,
    "Run a job in another cluster",
    answer=JobView,
    status=202,
    raises=[ClusterNotFound, MoveRefused, PreconditionFailed],
)
async def move_job(
    context: AppContext,
    job_id: JobId,
    move: Annotated[MoveRequest, body(MoveRequest, {"to": "west"})],
    job: Job,
    if_match: IfMatch = None,
) -> Response:
    """Once the job would start there, or with `at_once` now, an attempt elsewhere saves and ends, the job returns to
    the queue, and goes on there without losing a step. The request is refused if the job could not run there. `any`:
    the scheduler may choose again, and an attempt stays where it is. With `If-Match`, only if the ETag is still this
    one."""
    await require_runs_in(context, job, move.to, is_repeated=not move.at_once)
    change = partial(
        context.store.writing(submissions.move),
        at_once=move.at_once,
        if_match=spec_tags(if_match),
        now=context.clock(),
    )
    return job_response(await run_in_threadpool(change, job_id, move.to), 202)


async def require_runs_in(context: Context, job: JobView, cluster: str, *, is_repeated: bool = True) -> None:
    """Raises MoveRefused if the job cannot run in that cluster.

    Args:
        is_repeated: a request for the cluster that the spec names already is not checked again.
    """
    known = job.spec.worker.cluster if is_repeated else job.status.cluster
    if cluster in (ANY_CLUSTER, known) or job.status.state.ended:
        return  # of a job that has ended the store says so
    why = await context.cluster.why_not_in(job, cluster)
    if why:
        raise MoveRefused(job.id, cluster, why)
