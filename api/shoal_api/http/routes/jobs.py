"""Routes that submit, list, show, change, pause, resume and cancel jobs."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import needs, require_visible, visible_projects
from shoal_api.http.access.owned_spec import OwnedSpec, of_principal, require_no_directory_of_server
from shoal_api.http.conditional import is_unchanged, job_response, spec_tags
from shoal_api.http.context import Context, IfMatch, JobId, wants_events
from shoal_api.http.documents import (
    JSON_TYPES,
    LABEL_FORMS,
    PATCH_TYPES,
    SEARCH_WORDS,
    YAML_TYPES,
    read_model,
    read_spec,
    selectors_of,
)
from shoal_api.http.followers import JobFollower, JobListFollower
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind
from shoal_api.http.routes.lifecycle import require_runs_in
from shoal_api.http.routes.quotas import PROJECT_NAME, USER_NAME
from shoal_api.http.streams import STREAMED, sse_response
from shoal_service.control import submission
from shoal_service.control.submission import dry_run, submit
from shoal_service.core.access import Permission
from shoal_service.core.desired import Desired
from shoal_service.core.selection import MAX_SELECTORS
from shoal_service.fleet_views import DryRun
from shoal_service.store import job_lists, submissions
from shoal_service.views import JobPatch, JobSummary, JobView, Page
from shoal_workers.contract.job import JobState

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


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
    store = context.store

    @router.post(
        "",
        dependencies=[needs(Permission.JOBS_SUBMIT)],
        status_code=201,
        response_model=JobView,
        summary="Submit a job",
        openapi_extra=body_of("JobSpec", (*JSON_TYPES, *YAML_TYPES[:1])),
        responses={
            200: {"model": JobView, "description": "An earlier request with this Idempotency-Key created the job."}
        },
    )
    async def submit_job(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
        """The body is a job spec. The answer is the job, with its address in `Location` and its `ETag`."""
        owned = await _owned(request)
        job, created = await run_in_threadpool(_submit, context, owned, idempotency_key)
        return job_response(job, 201 if created else 200, {"Location": f"/v1/jobs/{job.id}"})

    @router.post(
        "/dry-run",
        dependencies=[needs(Permission.JOBS_SUBMIT)],
        response_model=DryRun,
        summary="Check what a submission would become",
        openapi_extra=body_of("JobSpec", (*JSON_TYPES, *YAML_TYPES[:1])),
    )
    async def try_job(
        request: Request,
        uploads: Annotated[
            bool, Query(description="The client uploads `code.archive` before it submits: it need not be stored yet.")
        ] = False,
    ) -> Response:
        """Makes every check of a submission, with its refusals; then predicts layouts and start. Nothing is stored."""
        owned = await _owned(request)
        found = await run_in_threadpool(_dry_run, context, owned, uploads)
        return Response(found.model_dump_json(), media_type="application/json")

    @router.get(
        "",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[JobSummary],
        summary="List jobs",
        responses=STREAMED,
    )
    async def list_jobs(
        request: Request,
        state: Annotated[list[JobState], Query(max_length=20, description="Only jobs in one of these states.")] = [],  # noqa: B006
        project: Annotated[
            str | None, Query(pattern=PROJECT_NAME, description="Only jobs of this project, without those below it.")
        ] = None,
        user: Annotated[str | None, Query(pattern=USER_NAME, description="Only jobs of this user.")] = None,
        label: Annotated[list[str], Query(max_length=MAX_SELECTORS, description=LABEL_FORMS)] = [],  # noqa: B006
        search: Annotated[str, Query(max_length=200, description=SEARCH_WORDS)] = "",
        limit: Annotated[int, Query(ge=1, le=1000, description="Jobs per page.")] = 100,
        cursor: Annotated[str | None, Query(max_length=512, description="`next_cursor` of the page before.")] = None,
    ) -> Response:
        """Lists jobs, newest first. With `Accept: text/event-stream`: this page, now and after every change."""
        page_of = partial(
            store.reading(job_lists.page),
            states=tuple(state),
            project=project,
            user=user,
            limit=limit,
            cursor=cursor,
            visible=visible_projects(request),
            labels=selectors_of(label),
            search=search,
        )
        page = await run_in_threadpool(page_of)  # for a stream too: a bad cursor is refused before it begins
        if wants_events(request):
            follower = JobListFollower(page_of)
            return sse_response(context.changes, None, follower, context.pace, min_gap_s=context.pace.refresh_s)
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/{job_id}",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=JobView,
        summary="Show a job",
        responses={**STREAMED, 304: {"description": "If-None-Match names its present ETag."}},
    )
    async def show_job(request: Request, job_id: JobId, if_none_match: IfNoneMatch = None) -> Response:
        """Returns spec and status. With `Accept: text/event-stream`: the job, now and after every change, until its
        end."""
        job = await run_in_threadpool(store.get_job, job_id)
        if wants_events(request):
            follower = JobFollower(store, job_id)
            return sse_response(context.changes, job_id, follower, context.pace, min_gap_s=context.pace.refresh_s)
        response = job_response(job, 200)
        if if_none_match is not None and is_unchanged(if_none_match, response.headers["ETag"]):
            return Response(status_code=304, headers={"ETag": response.headers["ETag"], "Cache-Control": "no-cache"})
        return response

    @router.patch(
        "/{job_id}",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=JobView,
        summary="Change the spec of a job",
        openapi_extra=body_of("JobPatch", PATCH_TYPES),
    )
    async def patch_job(request: Request, job_id: JobId, if_match: IfMatch = None) -> Response:
        """Changes elasticity, parallelism, priority, deadline, the end, the learning rate, validation, weights of a
        mixture, code and `worker.cluster`, with which a job moves (see `/move`). Absent keys stay as they are;
        `parallelism` and `stop` are replaced as a whole. A running job follows at a step boundary. `labels` and
        `annotations` are merged (null removes one), also those of a job that has ended. With `If-Match`, only if the
        ETag is still this one."""
        patch = await read_model(request, JobPatch, PATCH_TYPES, invalid=Kind.INVALID_PATCH)
        if patch.code is not None:
            require_no_directory_of_server(patch.code.working_dir, principal_of(request))
        if patch.worker is not None:
            await require_runs_in(context, await run_in_threadpool(store.get_job, job_id), patch.worker.cluster)
        tags = spec_tags(if_match)
        change = partial(submission.patch, store, job_id, patch, if_match=tags, now=context.clock())
        job = await run_in_threadpool(change, places=context.places)
        return job_response(job, 200)

    def add_request(verb: str, desired: Desired, summary: str, description: str) -> None:
        async def request_job(job_id: JobId) -> Response:
            job = await run_in_threadpool(store.writing(submissions.request), job_id, desired, now=context.clock())
            return job_response(job, 202)

        router.add_api_route(
            f"/{{job_id}}/{verb}",
            request_job,
            methods=["POST"],
            dependencies=[needs(Permission.JOBS_CHANGE)],
            status_code=202,
            response_model=JobView,
            name=f"{verb}_job",
            summary=summary,
            description=description,
        )

    add_request("cancel", Desired.CANCEL, "Cancel a job", "This cannot be undone. Checkpoints are kept.")
    add_request("pause", Desired.PAUSE, "Pause a job", "The job writes a checkpoint, and its workers end.")
    add_request(
        "resume", Desired.RUN, "Resume a paused job", "The job returns to the queue and continues from its checkpoint."
    )
    return router


async def _owned(request: Request) -> OwnedSpec:
    """Return the spec of the body, as the principal may submit it."""
    spec = await read_spec(request)
    if spec.continue_from is not None:  # its checkpoint is read: only those who see that job may start from it
        await require_visible(request, spec.continue_from.job)
    return of_principal(spec, principal_of(request))


def _submit(context: Context, owned: OwnedSpec, idempotency_key: str | None) -> tuple[JobView, bool]:
    return submit(context.store, owned.spec, idempotency_key, context.clock(), context.surroundings(owned.note))


def _dry_run(context: Context, owned: OwnedSpec, uploads: bool) -> DryRun:
    return dry_run(
        context.store,
        owned.spec,
        context.clock(),
        context.surroundings(owned.note),
        uploads=uploads,
        forecast=context.cluster.expected_start,
    )
