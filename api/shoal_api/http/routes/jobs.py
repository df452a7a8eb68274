"""Routes that submit, list, show, change and delete jobs, and that let them go on: in place, to more steps or after a
failure, or in another cluster. A new job that goes on from another one's checkpoint is submitted with `continue_from`.
Also those that archive a job that has ended, and delete what ended jobs leave behind.

Also a spec that is not submitted yet: its code, a check, its JSON Schema, its predicted layouts; and sweeps, which
submit a spec many times. The project of a submitted spec must be one of the principal's, and its user is the
principal's: limits of users and shares of projects would mean nothing if a spec could name another's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import CodeStored, SpecCheck
from shoal_api.http.access.authentication import read_principal
from shoal_api.http.access.needs import require_visible
from shoal_api.http.access.request_scope import LIMITER
from shoal_api.http.conditional import job_response, spec_tags
from shoal_api.http.context import Context
from shoal_api.http.edge import CLIENT_GONE
from shoal_api.http.followers import follow_document, follow_job
from shoal_api.http.json_router import (
    PROJECT_NAME,
    AppContext,
    Caller,
    Cursor,
    IfMatch,
    Job,
    JobId,
    JobsFilter,
    JobsOfProject,
    JsonRouter,
    ProjectName,
    Reading,
    Writing,
    json_response,
    wants_events,
)
from shoal_api.http.problems import (
    BodyTooLarge,
    Forbidden,
    InvalidPatch,
    InvalidRequest,
    InvalidSpec,
    UnsupportedMediaType,
)
from shoal_api.http.request_bodies import PATCH_TYPES, SPEC, body, read_body, read_spec, require_media_type
from shoal_api.http.routes.artifacts import DELETE_S
from shoal_api.http.streams import STREAMED, sse_response, while_connected
from shoal_service.control import submission
from shoal_service.control.code_archive import CodeArchiveError, check
from shoal_service.control.planning import MeasuredSteps, PlanAnswer, PlanRequest
from shoal_service.control.submission import CodeUnknown, check_spec, expand_specs, fill_name, submit_sweep
from shoal_service.core.access import Permission, Principal, Role
from shoal_service.core.desired import Desired
from shoal_service.core.sweeps import InvalidGrid
from shoal_service.fleet_views import DeletionView, DryRun, GcView, SweepCurves, SweepSummary, SweepView
from shoal_service.store import (
    ClusterNotFound,
    Conflict,
    IdempotencyConflict,
    InvalidArchive,
    InvalidCursor,
    JobEnded,
    JobNotFound,
    MoveRefused,
    PreconditionFailed,
    QueueFull,
    RequestConflict,
    SweepConflict,
    SweepNotFound,
    archives,
    checkpoint_rows,
    job_deletion,
    job_lists,
    submissions,
    sweep_jobs,
)
from shoal_service.store.curves import newest_steps
from shoal_service.store.job_deletion import DeletionRequest
from shoal_service.telemetry.tallies import Limit
from shoal_service.views import (
    ExtendRequest,
    JobPatch,
    JobSummary,
    JobView,
    MoveRequest,
    Page,
    SweepRequest,
    TakeRequest,
)
from shoal_workers.contract import ANY_CLUSTER, SWEEP_NAME, JobSpec
from shoal_workers.contract.checks.spec_errors import SpecError, job_spec_schema


@dataclass(frozen=True, slots=True)
class OwnedSpec:
    spec: JobSpec
    note: str
    """What was changed, for the note of the job's status."""


def adopt_spec(spec: JobSpec, principal: Principal) -> OwnedSpec:
    """Return the spec with the principal's user; and its project, if the spec names none and the principal has only
    one.

    Raises:
        Forbidden: if the principal may not submit jobs of this project, may not have the server read a
            directory of its own machine, or may not set a webhook for mail and chat.
    """
    changes, notes = {}, []
    if not principal.sees(spec.project):
        assert principal.projects is not None
        if "project" in spec.model_fields_set or len(principal.projects) != 1:
            names = ", ".join(sorted(principal.projects))
            raise Forbidden(f"{principal.name} may submit jobs of {names}, not of the project {spec.project!r}.")
        changes["project"] = next(iter(principal.projects))
    if spec.code.archive is None:
        require_no_directory_of_server(spec.code.working_dir, principal)
    if principal.role is not Role.ADMIN and any(hook.is_apprise for hook in spec.webhooks):
        raise Forbidden(
            "a webhook has the url 'apprise:', which only an admin may set: its secret decides which programs and "
            "hosts are called. Use an https:// receiver, or ask an admin for one in SHOAL_WEBHOOKS.",
        )
    if principal.user and spec.user != principal.user:
        changes["user"] = principal.user
        if "user" in spec.model_fields_set:
            notes.append(f"user is {principal.user}, not {spec.user}: the token submits jobs of its user only.")
    return OwnedSpec(spec.model_copy(update=changes) if changes else spec, " ".join(notes))


def require_no_directory_of_server(working_dir: str | None, principal: Principal) -> None:
    """Only an admin may submit `code` without an archive: it names a directory of the server. Raises
    Forbidden."""
    if working_dir is not None and principal.role is not Role.ADMIN:
        raise Forbidden(
            f"code.working_dir {working_dir!r} without code.archive is a directory of the server, which only "
            "an admin may name. The command line and the Python client upload yours: PUT /v1/code/{sha256}.",
        )


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


async def _read_owned_spec(request: Request) -> OwnedSpec:
    """Return the spec of the body, as the principal may submit it."""
    spec = await read_spec(request)
    if spec.continue_from is not None:  # its checkpoint is read: only those who see that job may start from it
        await require_visible(request, spec.continue_from.job)
    return adopt_spec(spec, read_principal(request))


Submitted = Annotated[OwnedSpec, Depends(_read_owned_spec)]
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
    follower = follow_document("jobs", lambda: read_page().model_dump_json())
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
        follower = follow_job(context.store, job_id)
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
    current = job.spec.worker.cluster if is_repeated else job.status.cluster
    if cluster in (ANY_CLUSTER, current) or job.status.state.ended:
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
    view = await context.retention.finish_deletion(deletion)
    return json_response(view, 200 if view.finished_at is not None else 202)


@retention_router.route("GET /deletions", Permission.JOBS_READ, "List the deletions of jobs")
def list_deletions(
    tx: Reading,
    caller: Caller,
    project: JobsOfProject = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="The newest ones.")] = 100,
) -> Page[DeletionView]:
    """Lists deletions, newest first; also those that are not complete yet."""
    items = job_deletion.read_newest(tx, project=project, limit=limit, visible=caller.projects)
    return Page[DeletionView](items=tuple(items))


@retention_router.route("POST /gc", Permission.RETENTION_RUN, "Delete what ended jobs leave behind")
async def collect_garbage(
    context: AppContext,
    dry_run: Annotated[bool, Query(description="Only say what would be deleted.")] = False,
) -> GcView:
    """Deletes what is older than the settings `SHOAL_RETAIN_...` allow, as the control plane does by itself every
    `SHOAL_GC_EVERY_S` seconds. The request ends after some seconds; while `is_complete` is false, repeat it."""
    return await context.retention.collect(dry_run=dry_run, within_s=_GC_S, limit=_MAX_REMOVALS)


_ZIP_TYPES = ("application/zip", "application/octet-stream")
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ZIP_BODY = {"requestBody": {"required": True, "content": dict.fromkeys(_ZIP_TYPES, _BINARY)}}
_PLAN = {
    "spec": {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}, "elasticity": {"max_workers": 8}},
    "workers": 8,
}
Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="Hexadecimal SHA-256 of the body.")]

spec_router = JsonRouter("/v1", "specs")


@spec_router.route(
    "PUT /code/{sha256}",
    Permission.JOBS_SUBMIT,
    "Upload a code archive",
    status=201,
    openapi_extra=_ZIP_BODY,
    raises=[InvalidArchive, BodyTooLarge, UnsupportedMediaType],
)
async def put_code(request: Request, context: AppContext, sha256: Sha256) -> CodeStored:
    """Stores a zip of the user's modules under its SHA-256; a spec names it as `code.archive`. Idempotent."""
    require_media_type(request, _ZIP_TYPES)
    with request.scope[LIMITER].upload(request):
        data = await read_body(request, Limit.ARCHIVE_BYTES)
        try:
            await run_in_threadpool(check, sha256, data)
        except CodeArchiveError as error:
            raise InvalidArchive(str(error)) from None
        archive = await run_in_threadpool(archives.check, sha256, data)
        await run_in_threadpool(context.store.writing(archives.put), archive, now=context.clock())
    return CodeStored(sha256=sha256, bytes=len(data))


@spec_router.route("POST /specs/validate", Permission.SPECS_CHECK, "Check a job spec without submitting it", body=SPEC)
async def validate_spec(request: Request, context: AppContext) -> SpecCheck:
    """Lists every error of the spec. For an invalid spec the answer is 200 with `valid: false`."""
    try:
        spec = await read_spec(request)
        check_spec(spec, context.places, context.webhooks)
    except SpecError as error:
        return SpecCheck(valid=False, errors=error.problems)
    return SpecCheck(valid=True, spec=spec)


@spec_router.route("GET /spec-schema", Permission.SPECS_CHECK, "JSON Schema of a job spec")
async def spec_schema() -> dict[str, Any]:
    """The schema is for editors and generators. It has the keys of `model` and `data` for each of the built-in
    tasks."""
    return job_spec_schema()


@spec_router.route(
    "POST /plans", Permission.SPECS_CHECK, "Predict the layouts of a job", answer=PlanAnswer, raises=[InvalidSpec]
)
async def make_plan(
    request: Request, context: AppContext, plan: Annotated[PlanRequest, body(PlanRequest, _PLAN)]
) -> Response:
    """Ranks legal layouts for a number of workers, or of GPUs of one kind, best first: memory and step time by
    part, with reasons. Steps that jobs on this hardware have measured correct the predictions. Nothing is submitted or
    run. A search that takes longer than 20 s is refused."""
    jobs = await run_in_threadpool(context.store.reading(newest_steps))
    measured = [MeasuredSteps(spec=job.spec, workers=job.workers, step_s=job.step_s) for job in jobs]
    answer = await while_connected(request, context.planning.answer(plan, measured))
    return Response(status_code=CLIENT_GONE) if answer is None else json_response(answer)


SweepName = Annotated[str, Path(pattern=SWEEP_NAME, description="The name of the sweep, as its submission answered.")]
_EXAMPLE = {
    "name": "rates",
    "spec": {"name": "tiny", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}},
    "grid": {"optimizer.lr": ["1e-3", "4e-3", "1e-2"], "seed": [1, 2]},
    "limit": 4,
    "prune": "median",
    "warmup_steps": 40,
}

sweep_router = JsonRouter("/v1/sweeps", "sweeps")


@sweep_router.route(
    "POST",
    Permission.JOBS_SUBMIT,
    "Submit a sweep",
    answer=SweepView,
    status=201,
    responses={200: {"model": SweepView, "description": "An earlier request has submitted all of its jobs."}},
    raises=[InvalidSpec, CodeUnknown, SweepConflict, QueueFull],
)
async def create_sweep(
    request: Request,
    context: AppContext,
    caller: Caller,
    sweep: Annotated[SweepRequest, body(SweepRequest, _EXAMPLE)],
) -> Response:
    """Submits a job for each combination of the grid, or for each of `samples` draws, all or none, in one
    transaction. The answer has the jobs in the order of the grid or the draws, and its address is in `Location`.
    The server keeps to the limit and prunes."""
    sweep = fill_name(sweep)
    owned = await run_in_threadpool(_expand_specs, sweep, caller)
    for job_id in sorted({job.spec.continue_from.job for job in owned if job.spec.continue_from is not None}):
        await require_visible(request, job_id)
    view, created = await run_in_threadpool(_store_jobs, context, str(sweep.name), owned)
    return json_response(view, 201 if created else 200, {"Location": f"/v1/sweeps/{view.project}/{view.name}"})


@sweep_router.route("GET", Permission.JOBS_READ, "List sweeps", raises=[InvalidCursor])
def list_sweeps(
    tx: Reading,
    caller: Caller,
    project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only sweeps of this project.")] = None,
    name: Annotated[str | None, Query(pattern=SWEEP_NAME, description="Only sweeps with this name.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Sweeps per page.")] = 100,
    cursor: Cursor = None,
) -> Page[SweepSummary]:
    """Lists sweeps, newest first, with the numbers of their jobs by state."""
    return sweep_jobs.read_page(tx, project=project, name=name, visible=caller.projects, limit=limit, cursor=cursor)


@sweep_router.route("GET /{project}/{name}", Permission.JOBS_READ, "Show a sweep", raises=[SweepNotFound])
def show_sweep(tx: Reading, caller: Caller, project: ProjectName, name: SweepName) -> SweepView:
    """Returns its rules, and its jobs with their values as labels, the best first."""
    _require_visible(caller, project, name)
    return sweep_jobs.read_sweep(tx, project, name)


@sweep_router.route(
    "GET /{project}/{name}/curves", Permission.JOBS_READ, "Show the curves of a sweep", raises=[SweepNotFound]
)
def show_curves(
    tx: Reading,
    caller: Caller,
    project: ProjectName,
    name: SweepName,
    measure: Annotated[Literal["loss", "val_loss"], Query(description="Which loss.")] = "loss",
) -> SweepCurves:
    """Returns the losses of all of its jobs with a bounded number of points, the best so far by time, and how much
    each label matters."""
    _require_visible(caller, project, name)
    return sweep_jobs.read_curves(tx, project, name, measure)


@sweep_router.route(
    "POST /{project}/{name}/cancel", Permission.JOBS_CHANGE, "Cancel a sweep", status=202, raises=[SweepNotFound]
)
def cancel_sweep(tx: Writing, context: AppContext, caller: Caller, project: ProjectName, name: SweepName) -> SweepView:
    """Cancels all of its jobs that have not ended. Their checkpoints are kept. The answer has the jobs that this
    request has cancelled."""
    _require_visible(caller, project, name)
    cancelled = sweep_jobs.cancel(tx, project, name, now=context.clock())
    view = sweep_jobs.read_sweep(tx, project, name, cancelled)
    return view if cancelled else view.model_copy(update={"jobs": ()})


def _require_visible(caller: Principal, project: str, name: str) -> None:
    """Raises SweepNotFound if the principal does not see the project of the sweep."""
    if not caller.sees(project):
        raise SweepNotFound(project, name)


def _expand_specs(sweep: SweepRequest, caller: Principal) -> list[OwnedSpec]:
    """Return the specs of the jobs, as the principal may submit them. Raises SpecError, InvalidRequest, Forbidden."""
    try:
        specs = expand_specs(sweep)
    except InvalidGrid as error:
        raise InvalidRequest(str(error)) from None
    return [adopt_spec(spec, caller) for spec in specs]


def _store_jobs(context: Context, name: str, owned: list[OwnedSpec]) -> tuple[SweepView, bool]:
    jobs = [(job.spec, context.submit_context(job.note)) for job in owned]
    ids, created = submit_sweep(context.store, name, jobs, context.clock())
    return context.store.reading(sweep_jobs.read_sweep)(owned[0].spec.project, name, ids), created
