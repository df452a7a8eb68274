"""Routes that delete a job, list deletions, and delete what ended jobs leave behind."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.json_router import AppContext, Caller, JsonRouter, Reading, json_response
from shoal_api.http.parameters import JobId, JobsOfProject
from shoal_service.core.access import Permission
from shoal_service.fleet_views import DeletionView, GcView
from shoal_service.store import Conflict, JobNotFound, job_deletion
from shoal_service.store.job_deletion import DeletionRequest
from shoal_service.views import Page

_GC_S = 20.0
_MAX_REMOVALS = 500
"""Removals in one answer, at most."""

router = JsonRouter("/v1", "operations")


@router.route(
    "DELETE /jobs/{job_id}",
    Permission.JOBS_CHANGE,
    "Delete a job",
    answer=DeletionView,
    tags=["jobs"],
    responses={202: {"model": DeletionView, "description": "Begun; the storage does not answer. It is continued."}},
    raises=[JobNotFound, Conflict],
)
async def delete_job(
    context: AppContext,
    caller: Caller,
    job_id: JobId,
    checkpoints: Annotated[
        bool, Query(description="Delete its checkpoints, profiles and event files in the storage too.")
    ] = True,
) -> Response:
    """Deletes the job with its history; this cannot be undone. A job that has not ended is refused: cancel it
    first. Pinned checkpoints stay in the storage; `kept` names them. A deletion that was interrupted is continued
    by the control plane that holds the lease, or by the same request again. Idempotent."""
    store = context.store
    deletion = await run_in_threadpool(store.reading(job_deletion.find), job_id)
    if deletion is None:
        job = await run_in_threadpool(store.get_job, job_id)
        root = context.storage.root(job)
        deletion_request = DeletionRequest(root=root, with_checkpoints=checkpoints, by=caller.name)
        begin = partial(store.writing(job_deletion.begin), job_id, deletion_request, now=context.clock())
        deletion = await run_in_threadpool(begin)
    view = await context.retention.deleter.advance(deletion)
    return json_response(view, 200 if view.finished_at is not None else 202)


@router.route("GET /deletions", Permission.JOBS_READ, "List the deletions of jobs")
def list_deletions(
    tx: Reading,
    caller: Caller,
    project: JobsOfProject = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="The newest ones.")] = 100,
) -> Page[DeletionView]:
    """Lists deletions, newest first; also those that are not complete yet."""
    items = job_deletion.newest(tx, project=project, limit=limit, visible=caller.projects)
    return Page[DeletionView](items=tuple(items))


@router.route("POST /gc", Permission.RETENTION_RUN, "Delete what ended jobs leave behind")
async def collect_garbage(
    context: AppContext,
    dry_run: Annotated[bool, Query(description="Only say what would be deleted.")] = False,
) -> GcView:
    """Deletes what is older than the settings `SHOAL_RETAIN_...` allow, as the control plane does by itself every
    `SHOAL_GC_EVERY_S` seconds. The request ends after some seconds; while `is_complete` is false, repeat it."""
    return await context.retention.collect(dry_run=dry_run, within_s=_GC_S, limit=_MAX_REMOVALS)
