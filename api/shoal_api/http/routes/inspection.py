"""Routes that look into the workers of a running job: the stacks of a rank, and profiles.

A request is stored; the control loop passes it to the supervisor, which carries it out. The files of a profile are read
from the job's directory.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context, JobId
from shoal_api.http.documents import JSON_TYPES, read_model, require_no_body
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind, ProblemError
from shoal_service.cluster.errors import SupervisorUnavailable
from shoal_service.core.access import Permission
from shoal_service.store import profile_requests
from shoal_service.store.errors import RequestConflict
from shoal_service.views import Page, ProfileBody, ProfileView
from shoal_workers.contract.messages import Stacks
from shoal_workers.contract.profiles import TRACE_FILE

Number = Annotated[int, Path(ge=1, le=2**31 - 1, description="Number of the profile, from 1.")]
FileName = Annotated[
    str, Path(pattern=TRACE_FILE.pattern, description="Name of one of its `files`: trace-rank0-g1.json.gz.")
]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["inspection"])

    @router.get(
        "/stacks",
        dependencies=[needs(Permission.JOBS_INSPECT)],
        response_model=Stacks,
        summary="What all workers of a job do now",
    )
    async def stacks(
        job_id: JobId,
        rank: Annotated[int | None, Query(ge=0, le=10_000_000, description="Only this rank.")] = None,
        native: Annotated[bool, Query(description="Also frames of native code; each worker is paused for it.")] = False,
    ) -> Response:
        """Returns the stacks of the training threads, clustered by equal ones, also of workers that hang or are
        stopped. It takes a second, and some seconds if a worker does not answer."""
        job = await run_in_threadpool(context.store.get_job, job_id)
        try:
            found = await context.cluster.stacks(job_id, rank=rank, native=native)
        except SupervisorUnavailable as error:
            raise ProblemError(Kind.NOT_READY, f"The supervisor of job {job_id} does not answer: {error}") from error
        if found is None:
            raise RequestConflict(job_id, job.status.state, "show stacks: this server drives no workers of it")
        return Response(found.model_dump_json(), media_type="application/json")

    return router


def profile_routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}/profiles", tags=["inspection"])
    store = context.store

    @router.post(
        "",
        dependencies=[needs(Permission.JOBS_INSPECT)],
        response_model=ProfileView,
        status_code=201,
        summary="Profile a rank of a running job",
        openapi_extra=body_of("ProfileBody", JSON_TYPES, required=False),
    )
    async def request_profile(request: Request, job_id: JobId) -> Response:
        """Profiles some steps of this rank from its next step boundary on, without stopping the job or changing a
        number. The answer comes at once; the profile has ended when its `state` is not `requested` any more (event
        `profile.taken` or `profile.failed`). A job has one open request at a time. If the group loses a worker
        meanwhile, the profile fails with a reason, and training goes on."""
        body = await _body(request)
        view = await run_in_threadpool(store.writing(profile_requests.create), job_id, body, now=context.clock())
        return Response(view.model_dump_json(), status_code=201, media_type="application/json")

    @router.get(
        "", dependencies=[needs(Permission.JOBS_READ)], response_model=Page[ProfileView], summary="Profiles of a job"
    )
    async def list_profiles(job_id: JobId) -> Response:
        """Lists profiles, oldest first, each with the table of where the time of its steps went. The newest 8 are
        kept."""
        views = await run_in_threadpool(store.reading(profile_requests.views), job_id)
        page = Page[ProfileView].model_construct(items=tuple(views))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/{number}", dependencies=[needs(Permission.JOBS_READ)], response_model=ProfileView, summary="One profile"
    )
    async def get_profile(job_id: JobId, number: Number) -> Response:
        """Returns its state, the table of where the time of its steps went, and its files."""
        view = await run_in_threadpool(store.reading(profile_requests.view), job_id, number)
        return Response(view.model_dump_json(), media_type="application/json")

    @router.get(
        "/{number}/files/{name}",
        dependencies=[needs(Permission.JOBS_READ)],
        response_class=Response,
        summary="A file of a profile",
        responses={200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def profile_file(job_id: JobId, number: Number, name: FileName) -> Response:
        """Compressed JSON: `trace-...` is a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing open
        as it is; `memory-...` is the timeline of what tensors took. Read from the storage of the job.
        """
        job = await run_in_threadpool(store.get_job, job_id)
        view = await run_in_threadpool(store.reading(profile_requests.view), job_id, number)
        known = {file.name for file in view.files}
        found = await context.storage.profile_file(job, number, name) if name in known else None
        if found is None:
            if name not in known:
                raise ProblemError(Kind.PROFILE_NOT_FOUND, f"Profile {number} of job {job_id} has no file {name}.")
            raise ProblemError(
                Kind.PROFILE_NOT_FOUND, f"{name} is not in the storage of job {job_id} any more, or not reachable here."
            )
        length, pieces = found
        headers = {
            "Content-Disposition": f'attachment; filename="{job_id}-profile-{number}-{name}"',
            "Content-Length": str(length),
        }
        return StreamingResponse(pieces, media_type="application/gzip", headers=headers)

    return router


async def _body(request: Request) -> ProfileBody:
    """Read the body. A request without one means three steps of rank 0."""
    if "content-type" not in request.headers:
        await require_no_body(request)
        return ProfileBody()
    return await read_model(request, ProfileBody)
