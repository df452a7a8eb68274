"""Routes that look into the workers of a running job: the stacks of a rank, and profiles.

A request is stored; the control loop passes it to the supervisor, which carries it out. The files of a profile are read
from the job's directory.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from shoal_api.http.documents import body
from shoal_api.http.json_router import AppContext, Job, JsonRouter, Reading, Writing
from shoal_api.http.parameters import JobId
from shoal_api.http.problems import NotReady
from shoal_service.cluster.errors import SupervisorUnavailable
from shoal_service.core.access import Permission
from shoal_service.problems import ServiceError
from shoal_service.store import JobEnded, JobNotFound, RequestConflict, profile_requests
from shoal_service.store.errors import ProfileNotFound, ProfileOpen
from shoal_service.views import Page, ProfileBody, ProfileView
from shoal_workers.contract.messages import Stacks
from shoal_workers.contract.profiles import TRACE_FILE

Number = Annotated[int, Path(ge=1, le=2**31 - 1, description="Number of the profile, from 1.")]
FileName = Annotated[
    str, Path(pattern=TRACE_FILE.pattern, description="Name of one of its `files`: trace-rank0-g1.json.gz.")
]


class ProfileFileNotFound(ServiceError):
    kind = ProfileNotFound.kind


router = JsonRouter("/v1/jobs/{job_id}", "inspection", raises=[JobNotFound])


@router.route(
    "GET /stacks", Permission.JOBS_INSPECT, "What all workers of a job do now", raises=[RequestConflict, NotReady]
)
async def stacks(
    context: AppContext,
    job: Job,
    job_id: JobId,
    rank: Annotated[int | None, Query(ge=0, le=10_000_000, description="Only this rank.")] = None,
    native: Annotated[bool, Query(description="Also frames of native code; each worker is paused for it.")] = False,
) -> Stacks:
    """Returns the stacks of the training threads, clustered by equal ones, also of workers that hang or are
    stopped. It takes a second, and some seconds if a worker does not answer."""
    try:
        stacks = await context.cluster.stacks(job_id, rank=rank, native=native)
    except SupervisorUnavailable as error:
        raise NotReady(f"The supervisor of job {job_id} does not answer: {error}") from error
    if stacks is None:
        raise RequestConflict(job_id, job.status.state, "show stacks: this server drives no workers of it")
    return stacks


@router.route(
    "POST /profiles",
    Permission.JOBS_INSPECT,
    "Profile a rank of a running job",
    status=201,
    raises=[JobEnded, RequestConflict, ProfileOpen],
)
def request_profile(
    tx: Writing,
    context: AppContext,
    job_id: JobId,
    profile: Annotated[ProfileBody, body(ProfileBody, {"steps": 3, "rank": 0}, required=False)],
) -> ProfileView:
    """Profiles some steps of this rank from its next step boundary on, without stopping the job or changing a
    number. The answer comes at once; the profile has ended when its `state` is not `requested` any more (event
    `profile.taken` or `profile.failed`). A job has one open request at a time. If the group loses a worker
    meanwhile, the profile fails with a reason, and training goes on."""
    return profile_requests.create(tx, job_id, profile, now=context.clock())


@router.route("GET /profiles", Permission.JOBS_READ, "Profiles of a job")
def list_profiles(tx: Reading, job_id: JobId) -> Page[ProfileView]:
    """Lists profiles, oldest first, each with the table of where the time of its steps went. The newest 8 are
    kept."""
    return Page[ProfileView].model_construct(items=tuple(profile_requests.views(tx, job_id)))


@router.route("GET /profiles/{number}", Permission.JOBS_READ, "One profile", raises=[ProfileNotFound])
def get_profile(tx: Reading, job_id: JobId, number: Number) -> ProfileView:
    """Returns its state, the table of where the time of its steps went, and its files."""
    return profile_requests.view(tx, job_id, number)


@router.route(
    "GET /profiles/{number}/files/{name}",
    Permission.JOBS_READ,
    "A file of a profile",
    responses={200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}},
    raises=[ProfileNotFound],
)
async def profile_file(context: AppContext, job: Job, job_id: JobId, number: Number, name: FileName) -> Response:
    """Compressed JSON: `trace-...` is a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing open
    as it is; `memory-...` is the timeline of what tensors took. Read from the storage of the job.
    """
    view = await run_in_threadpool(context.store.reading(profile_requests.view), job_id, number)
    if name not in {file.name for file in view.files}:
        raise ProfileFileNotFound(f"Profile {number} of job {job_id} has no file {name}.")
    file = await context.storage.profile_file(job, number, name)
    if file is None:
        raise ProfileFileNotFound(f"{name} is not in the storage of job {job_id} any more, or not reachable here.")
    length, pieces = file
    headers = {
        "Content-Disposition": f'attachment; filename="{job_id}-profile-{number}-{name}"',
        "Content-Length": str(length),
    }
    return StreamingResponse(pieces, media_type="application/gzip", headers=headers)
