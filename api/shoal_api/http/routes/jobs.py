"""Routes that submit, list, show and change jobs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Depends, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import require_visible
from shoal_api.http.access.owned_spec import OwnedSpec, of_principal, require_no_directory_of_server
from shoal_api.http.conditional import job_response, spec_tags
from shoal_api.http.context import wants_events
from shoal_api.http.documents import PATCH_TYPES, SPEC, body, read_spec
from shoal_api.http.followers import DocumentFollower, JobFollower
from shoal_api.http.json_router import AppContext, Caller, JsonRouter, json_response
from shoal_api.http.parameters import (
    Archived,
    Columns,
    Cursor,
    IfMatch,
    JobId,
    JobsOfProjectAlone,
    JobsOfUser,
    Labels,
    Search,
    Sort,
    States,
    Where,
    selection_of,
    selectors_of,
)
from shoal_api.http.problems import InvalidPatch, InvalidSpec
from shoal_api.http.routes.lifecycle import require_runs_in
from shoal_api.http.streams import STREAMED, sse_response
from shoal_service.control import submission
from shoal_service.control.submission import CodeUnknown
from shoal_service.core.access import Permission
from shoal_service.fleet_views import DryRun
from shoal_service.store import (
    IdempotencyConflict,
    InvalidCursor,
    JobEnded,
    JobNotFound,
    PreconditionFailed,
    QueueFull,
    RequestConflict,
    job_lists,
)
from shoal_service.store.job_lists import FleetQuery
from shoal_service.views import JobPatch, JobSummary, JobView, Page

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
    return of_principal(spec, principal_of(request))


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
    surroundings = context.surroundings(owned.note)
    job, created = submission.submit(context.store, owned.spec, idempotency_key, context.clock(), surroundings)
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
        context.surroundings(owned.note),
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
    caller: Caller,
    state: States = [],  # noqa: B006
    project: JobsOfProjectAlone = None,
    user: JobsOfUser = None,
    label: Labels = [],  # noqa: B006
    search: Search = "",
    where: Where = "",
    sort: Sort = "",
    columns: Columns = "",
    archived: Archived = False,
    limit: Annotated[int, Query(ge=1, le=1000, description="Jobs per page.")] = 100,
    cursor: Cursor = None,
) -> Response:
    """Lists jobs, newest first if `sort` names nothing. With `Accept: text/event-stream`: this page, now and after
    every change."""
    query = FleetQuery(
        states=frozenset(state),
        project=project,
        user=user,
        limit=limit,
        visible=caller.projects,
        labels=selectors_of(label),
        search=search,
        selection=selection_of(where, sort, columns, archived=archived, now=context.clock()),
    )
    read_page = partial(context.store.reading(job_lists.page), query, cursor)
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
