"""Routes that submit, list, show, change and delete jobs, and that let them go on: in place, to more steps or after a
failure, or in another cluster. A new job that goes on from another one's checkpoint is submitted with `continue_from`.
Also those that archive a job that has ended, and delete what ended jobs leave behind.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import Depends, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import read_principal, require_visible
from shoal_api.http.access.owned_spec import OwnedSpec, of_principal, require_no_directory_of_server
from shoal_api.http.conditional import job_response, spec_tags
from shoal_api.http.context import Context, wants_events
from shoal_api.http.followers import DocumentFollower, JobFollower
from shoal_api.http.json_router import (
    PATCH_TYPES,
    SPEC,
    AppContext,
    Caller,
    Cursor,
    IfMatch,
    Job,
    JobId,
    JobsFilter,
    JobsOfProject,
    JsonRouter,
    Reading,
    Writing,
    body,
    json_response,
    read_spec,
)
from shoal_api.http.problems import InvalidPatch, InvalidSpec
from shoal_api.http.routes.artifacts import DELETE_S
from shoal_api.http.streams import STREAMED, sse_response
from shoal_service.control import submission
from shoal_service.control.submission import CodeUnknown
from shoal_service.core.access import Permission
from shoal_service.core.desired import Desired
from shoal_service.fleet_views import DeletionView, DryRun, GcView
from shoal_service.store import (
    ClusterNotFound,
    Conflict,
    IdempotencyConflict,
    InvalidCursor,
    JobEnded,
    JobNotFound,
    MoveRefused,
    PreconditionFailed,
    QueueFull,
    RequestConflict,
    checkpoint_rows,
    job_deletion,
    job_lists,
    submissions,
)
from shoal_service.store.job_deletion import DeletionRequest
from shoal_service.views import ExtendRequest, JobPatch, JobSummary, JobView, MoveRequest, Page, TakeRequest
from shoal_workers.contract import ANY_CLUSTER

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="A repeated request with the same key answers with the job of the first request.",
    ),
]
IfNoneMatch = Annotated[
    str | None,
    Header(
        alias="If-None-Match",
        max_length=1024,
        description="ETags that the client has: 304 if the job still has one of them.",
    ),
]
_PATCH = {"elasticity": {"max_workers": 4}, "priority": 10, "labels": {"team": "speech"}}


async def _owned(request: Request) -> OwnedSpec:
    """Return the spec of the body, as the principal may submit it."""
    spec = await read_spec(request)
    if spec.continue_from is not None:  # its checkpoint is read: only those who see that job may start from it
        await require_visible(request, spec.continue_from.job)
    return of_principal(spec, read_principal(request))


Submitted = Annotated[OwnedSpec, Depends(_owned)]
router = JsonRouter("/v1/jobs", "jobs")


@router.route(
    "POST",
    Permission.JOBS_SUBMIT,
    "Submit a job",
    answer=JobView,
    status=201,
    body=SPEC,
    responses={200: {"model": JobView, "description": "An earlier request with this Idempotency-Key created the job."}},
    raises=[InvalidSpec, CodeUnknown, IdempotencyConflict, QueueFull],
)
def submit_job(context: AppContext, owned: Submitted, idempotency_key: IdempotencyKey = None) -> Response:
    """The body is a job spec. The answer is the job, with its address in `Location` and its `ETag`."""
    submit_context = context.submit_context(owned.note)
    job, created = submission.submit(context.store, owned.spec, idempotency_key, context.clock(), submit_context)
    return job_response(job, 201 if created else 200, {"Location": f"/v1/jobs/{job.id}"})


@router.route(
    "POST /dry-run",
    Permission.JOBS_SUBMIT,
    "Check what a submission would become",
    body=SPEC,
    raises=[InvalidSpec, CodeUnknown, QueueFull],
)
def try_job(
    context: AppContext,
    owned: Submitted,
    uploads: Annotated[
        bool, Query(description="The client uploads `code.archive` before it submits: it need not be stored yet.")
    ] = False,
) -> DryRun:
    """Makes every check of a submission, with its refusals; then predicts layouts and start. Nothing is stored."""
    return submission.dry_run(
        context.store,
        owned.spec,
        context.clock(),
        context.submit_context(owned.note),
        uploads=uploads,
        forecast=context.cluster.expected_start,
    )


@router.route(
    "GET",
    Permission.JOBS_READ,
    "List jobs",
    answer=Page[JobSummary],
    responses=STREAMED,
    raises=[InvalidCursor],
)
def list_jobs(
    request: Request,
    context: AppContext,
    query: JobsFilter,
    limit: Annotated[int, Query(ge=1, le=1000, description="Jobs per page.")] = 100,
    cursor: Cursor = None,
) -> Response:
    """Lists jobs, newest first if `sort` names nothing. With `Accept: text/event-stream`: this page, now and after
    every change."""
    read_page = partial(context.store.reading(job_lists.page), replace(query, limit=limit), cursor)
    page = read_page()  # for a stream too: a bad cursor is refused before it begins
    if not wants_events(request):
        return json_response(page)
    follower = DocumentFollower("jobs", lambda: read_page().model_dump_json())
    return sse_response(context.changes, None, follower, context.pace, min_gap_s=context.pace.refresh_s)


@router.route(
    "GET /{job_id}",
    Permission.JOBS_READ,
    "Show a job",
    answer=JobView,
    responses={**STREAMED, 304: {"description": "If-None-Match names its present ETag."}},
    raises=[JobNotFound],
)
def show_job(request: Request, context: AppContext, job_id: JobId, if_none_match: IfNoneMatch = None) -> Response:
    """Returns spec and status. With `Accept: text/event-stream`: the job, now and after every change, until its
    end."""
    job = context.store.get_job(job_id)
    if wants_events(request):
        follower = JobFollower(context.store, job_id)
        return sse_response(context.changes, job_id, follower, context.pace, min_gap_s=context.pace.refresh_s)
    return job_response(job, if_none_match=if_none_match)


@router.route(
    "PATCH /{job_id}",
    Permission.JOBS_CHANGE,
    "Change the spec of a job",
    answer=JobView,
    raises=[JobNotFound, InvalidPatch, InvalidSpec, CodeUnknown, PreconditionFailed, JobEnded, RequestConflict],
)
async def patch_job(
    context: AppContext,
    caller: Caller,
    job_id: JobId,
    patch: Annotated[JobPatch, body(JobPatch, _PATCH, media_types=PATCH_TYPES, invalid=InvalidPatch)],
    if_match: IfMatch = None,
) -> Response:
    """Changes elasticity, parallelism, priority, deadline, the end, the learning rate, validation, weights of a
    mixture, code and `worker.cluster`, with which a job moves (see `/move`). Absent keys stay as they are;
    `parallelism` and `stop` are replaced as a whole. A running job follows at a step boundary. `labels` and
    `annotations` are merged (null removes one), also those of a job that has ended. With `If-Match`, only if the
    ETag is still this one."""
    store = context.store
    if patch.code is not None:
        require_no_directory_of_server(patch.code.working_dir, caller)
    if patch.worker is not None:
        await require_runs_in(context, await run_in_threadpool(store.get_job, job_id), patch.worker.cluster)
    change = partial(submission.patch, if_match=spec_tags(if_match), now=context.clock(), places=context.places)
    return job_response(await run_in_threadpool(change, store, job_id, patch))


lifecycle_router = JsonRouter("/v1/jobs/{job_id}", "jobs", raises=[JobNotFound, JobEnded, RequestConflict])


@lifecycle_router.route("POST /cancel", Permission.JOBS_CHANGE, "Cancel a job", answer=JobView, status=202)
def cancel_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """This cannot be undone. Checkpoints are kept."""
    return job_response(submissions.request(tx, job_id, Desired.CANCEL, now=context.clock()), 202)


@lifecycle_router.route("POST /pause", Permission.JOBS_CHANGE, "Pause a job", answer=JobView, status=202)
def pause_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """The job writes a checkpoint, and its workers end."""
    return job_response(submissions.request(tx, job_id, Desired.PAUSE, now=context.clock()), 202)


@lifecycle_router.route("POST /resume", Permission.JOBS_CHANGE, "Resume a paused job", answer=JobView, status=202)
def resume_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """The job returns to the queue and continues from its checkpoint."""
    return job_response(submissions.request(tx, job_id, Desired.RUN, now=context.clock()), 202)


@lifecycle_router.route(
    "POST /extend", Permission.JOBS_CHANGE, "Let a job go on to more steps", answer=JobView, status=202
)
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


@lifecycle_router.route("POST /retry", Permission.JOBS_CHANGE, "Let a failed job try again", answer=JobView, status=202)
def retry_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """The job returns to the queue in place, goes on from its newest checkpoint, and has its retry budget again."""
    return job_response(submissions.retry(tx, job_id, now=context.clock()), 202)


@lifecycle_router.route(
    "POST /take", Permission.JOBS_CHANGE, "Let a job go on from an older checkpoint", answer=JobView
)
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


@lifecycle_router.route("POST /archive", Permission.JOBS_CHANGE, "Archive a job that has ended", answer=JobView)
def archive_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """Lists leave the job out unless they are asked for archived ones. Nothing of it is deleted, and it returns to
    the lists if it goes on."""
    return job_response(submissions.archive(tx, job_id, True, now=context.clock()))


@lifecycle_router.route("POST /unarchive", Permission.JOBS_CHANGE, "Take a job back into the lists", answer=JobView)
def unarchive_job(tx: Writing, context: AppContext, job_id: JobId) -> Response:
    """The opposite of `/archive`."""
    return job_response(submissions.archive(tx, job_id, False, now=context.clock()))


@lifecycle_router.route(
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


_GC_S = 20.0
_MAX_REMOVALS = 500
"""Removals in one answer, at most."""

retention_router = JsonRouter("/v1", "operations")


@retention_router.route(
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


@retention_router.route("GET /deletions", Permission.JOBS_READ, "List the deletions of jobs")
def list_deletions(
    tx: Reading,
    caller: Caller,
    project: JobsOfProject = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="The newest ones.")] = 100,
) -> Page[DeletionView]:
    """Lists deletions, newest first; also those that are not complete yet."""
    items = job_deletion.newest(tx, project=project, limit=limit, visible=caller.projects)
    return Page[DeletionView](items=tuple(items))


@retention_router.route("POST /gc", Permission.RETENTION_RUN, "Delete what ended jobs leave behind")
async def collect_garbage(
    context: AppContext,
    dry_run: Annotated[bool, Query(description="Only say what would be deleted.")] = False,
) -> GcView:
    """Deletes what is older than the settings `SHOAL_RETAIN_...` allow, as the control plane does by itself every
    `SHOAL_GC_EVERY_S` seconds. The request ends after some seconds; while `is_complete` is false, repeat it."""
    return await context.retention.collect(dry_run=dry_run, within_s=_GC_S, limit=_MAX_REMOVALS)
