"""Routes that delete a job, list deletions, and delete what ended jobs leave behind."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import needs, visible_projects
from shoal_api.http.context import Context, JobId
from shoal_api.http.routes.quotas import PROJECT_NAME
from shoal_service.core.access import Permission
from shoal_service.fleet_views import DeletionView, GcView
from shoal_service.store import job_deletion
from shoal_service.store.job_deletion import DeletionRequest
from shoal_service.views import Page

_GC_S = 20.0
_MAX_REMOVALS = 500
"""Removals in one answer, at most."""


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["operations"])
    store = context.store

    @router.delete(
        "/jobs/{job_id}",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=DeletionView,
        tags=["jobs"],
        summary="Delete a job",
        responses={202: {"model": DeletionView, "description": "Begun; the storage does not answer. It is continued."}},
    )
    async def delete_job(
        request: Request,
        job_id: JobId,
        checkpoints: Annotated[
            bool, Query(description="Delete its checkpoints, profiles and event files in the storage too.")
        ] = True,
    ) -> Response:
        """Deletes the job with its history; this cannot be undone. A job that has not ended is refused: cancel it
        first. Pinned checkpoints stay in the storage; `kept` names them. A deletion that was interrupted is continued
        by the control plane that holds the lease, or by the same request again. Idempotent."""
        known = await run_in_threadpool(store.reading(job_deletion.find), job_id)
        if known is None:
            job = await run_in_threadpool(store.get_job, job_id)
            wanted = DeletionRequest(
                root=context.storage.root(job), with_checkpoints=checkpoints, by=principal_of(request).name
            )
            known = await run_in_threadpool(
                partial(store.writing(job_deletion.begin), job_id, wanted, now=context.clock())
            )
        done = await context.retention.deleter.advance(known)
        status = 200 if done.finished_at is not None else 202
        return Response(done.model_dump_json(), status, media_type="application/json")

    @router.get(
        "/deletions",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[DeletionView],
        summary="List the deletions of jobs",
    )
    async def list_deletions(
        request: Request,
        project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only jobs of this project.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="The newest ones.")] = 100,
    ) -> Response:
        """Lists deletions, newest first; also those that are not complete yet."""
        items = await run_in_threadpool(
            partial(store.reading(job_deletion.newest), project=project, limit=limit, visible=visible_projects(request))
        )
        return Response(Page[DeletionView](items=tuple(items)).model_dump_json(), media_type="application/json")

    @router.post(
        "/gc",
        dependencies=[needs(Permission.RETENTION_RUN)],
        response_model=GcView,
        summary="Delete what ended jobs leave behind",
    )
    async def collect_garbage(
        dry_run: Annotated[bool, Query(description="Only say what would be deleted.")] = False,
    ) -> Response:
        """Deletes what is older than the settings `SHOAL_RETAIN_...` allow, as the control plane does by itself every
        `SHOAL_GC_EVERY_S` seconds. The request ends after some seconds; while `is_complete` is false, repeat it."""
        view = await context.retention.collect(dry_run=dry_run, within_s=_GC_S, limit=_MAX_REMOVALS)
        return Response(view.model_dump_json(), media_type="application/json")

    return router
