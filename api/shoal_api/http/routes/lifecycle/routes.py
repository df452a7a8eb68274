"""Routes that let a job go on in place: to more steps, or after a failure. A new job that goes on from another one's
checkpoint is submitted with `continue_from`.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs
from shoal_api.http.conditional import job_response
from shoal_api.http.context import Context, JobId
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_service.core.access.roles import Permission
from shoal_service.views import ExtendRequest, JobView


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
        """In place: the same job, its history and its checkpoints. A running job gets its new end at the next step
        boundary; an ended one returns to the queue and goes on from its newest checkpoint. The learning rate follows
        `schedule`, whose decay ends with the new last step unless `schedule.steps` says otherwise."""
        body = await read_model(request, ExtendRequest, JSON_TYPES)
        job = await run_in_threadpool(store.extend_job, job_id, steps=body.steps, now=context.clock())
        return job_response(job, 202)

    @router.post(
        "/retry",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=JobView,
        status_code=202,
        summary="Let a failed job try again",
    )
    async def retry_job(job_id: JobId) -> Response:
        """In place: it returns to the queue, goes on from its newest checkpoint, and has its retry budget again."""
        job = await run_in_threadpool(store.retry_job, job_id, now=context.clock())
        return job_response(job, 202)

    return router
