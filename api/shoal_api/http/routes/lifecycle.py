"""Routes that let a job go on: in place, to more steps or after a failure; or in another cluster; and those that
archive one that has ended. A new job that goes on from another one's checkpoint is submitted with `continue_from`.
"""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs
from shoal_api.http.conditional import job_response, spec_tags
from shoal_api.http.context import Context, IfMatch, JobId
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_api.http.routes.checkpoints import DELETE_S
from shoal_service.core.access import Permission
from shoal_service.store import checkpoint_rows, submissions
from shoal_service.store.errors import MoveRefused
from shoal_service.views import ExtendRequest, JobView, MoveRequest, TakeRequest
from shoal_workers.contract.placing import ANY_CLUSTER


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"])
    store = context.store

    @router.post(
        "/extend",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=JobView,
        status_code=202,
        summary="Let a job go on to more steps",
        openapi_extra=body_of("ExtendRequest", JSON_TYPES),
    )
    async def extend_job(request: Request, job_id: JobId) -> Response:
        """The same job goes on in place, with its history and its checkpoints. A running job gets its new end at the
        next step boundary; an ended one returns to the queue and goes on from its newest checkpoint. The learning rate
        follows `schedule`, whose decay ends with the new last step unless `schedule.steps` says otherwise."""
        body = await read_model(request, ExtendRequest, JSON_TYPES)
        job = await run_in_threadpool(store.writing(submissions.extend), job_id, steps=body.steps, now=context.clock())
        return job_response(job, 202)

    @router.post(
        "/retry",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=JobView,
        status_code=202,
        summary="Let a failed job try again",
    )
    async def retry_job(job_id: JobId) -> Response:
        """The job returns to the queue in place, goes on from its newest checkpoint, and has its retry budget again."""
        job = await run_in_threadpool(store.writing(submissions.retry), job_id, now=context.clock())
        return job_response(job, 202)

    @router.post(
        "/take",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=JobView,
        summary="Let a job go on from an older checkpoint",
        openapi_extra=body_of("TakeRequest", JSON_TYPES),
    )
    async def take_checkpoint(request: Request, job_id: JobId) -> Response:
        """Deletes the good checkpoints of later steps, from the storage too, which cannot be undone. The job goes on
        from this step when it is resumed or tried again; with step 0 it starts over. Refused for a job that is queued
        or has workers, and if one of these checkpoints is pinned or needed."""
        body = await read_model(request, TakeRequest, JSON_TYPES)
        job = await run_in_threadpool(store.get_job, job_id)
        catalog, reason = context.storage.catalog(job), f"the job goes on from step {body.step} on request"
        for name in await run_in_threadpool(store.reading(checkpoint_rows.newer_than), job_id, body.step):
            await context.storage.run(partial(catalog.delete, name), within_s=DELETE_S)
            note = partial(
                store.writing(checkpoint_rows.note_deletion), job_id, name, now=context.clock(), reason=reason
            )
            await run_in_threadpool(note)
        return job_response(await run_in_threadpool(store.get_job, job_id), 200)

    @router.post(
        "/archive",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=JobView,
        summary="Archive a job that has ended",
    )
    async def archive_job(job_id: JobId) -> Response:
        """Lists leave the job out unless they are asked for archived ones. Nothing of it is deleted, and it returns to
        the lists if it goes on."""
        job = await run_in_threadpool(store.writing(submissions.archive), job_id, True, now=context.clock())
        return job_response(job, 200)

    @router.post(
        "/unarchive",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=JobView,
        summary="Take a job back into the lists",
    )
    async def unarchive_job(job_id: JobId) -> Response:
        """The opposite of `/archive`."""
        job = await run_in_threadpool(store.writing(submissions.archive), job_id, False, now=context.clock())
        return job_response(job, 200)

    @router.post(
        "/move",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=JobView,
        status_code=202,
        summary="Run a job in another cluster",
        openapi_extra=body_of("MoveRequest", JSON_TYPES),
    )
    async def move_job(request: Request, job_id: JobId, if_match: IfMatch = None) -> Response:
        """An attempt elsewhere saves and ends, the job returns to the queue, and goes on there without losing a step.
        The request is refused if the job could not run there. `any`: the scheduler may choose again, and an attempt
        stays where it is. With `If-Match`, only if the ETag is still this one."""
        body = await read_model(request, MoveRequest, JSON_TYPES)
        job = await run_in_threadpool(store.get_job, job_id)
        await require_runs_in(context, job, body.to)
        change = partial(
            store.writing(submissions.move), job_id, body.to, if_match=spec_tags(if_match), now=context.clock()
        )
        return job_response(await run_in_threadpool(change), 202)

    return router


async def require_runs_in(context: Context, job: JobView, cluster: str) -> None:
    """Raises MoveRefused if the job cannot run in that cluster."""
    if cluster in (ANY_CLUSTER, job.spec.worker.cluster) or job.status.state.ended:
        return  # of a job that has ended the store says so
    why = await context.cluster.why_not_in(job, cluster)
    if why:
        raise MoveRefused(job.id, cluster, why)
