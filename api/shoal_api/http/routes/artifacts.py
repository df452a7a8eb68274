"""Routes about what jobs leave: files, media, checkpoints with their lineage, and the registry of models.

Media are written by the code of jobs. So images are answered with the type that the ending of their name allows, with a
policy that lets a browser run nothing, and the page shows everything else as text. The control loop passes the pins of
checkpoints to the supervisor; the other verbs about checkpoints access the storage from this process.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Header, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from shoal_api.http.access.needs import require_visible
from shoal_api.http.conditional import tagged
from shoal_api.http.json_router import PROJECT_NAME, AppContext, Caller, Job, JobId, JsonRouter, Reading, Writing
from shoal_api.http.request_bodies import body
from shoal_service.artifact_views import (
    ALIAS_NAME,
    MODEL_NAME,
    AliasRequest,
    LineageView,
    MediaPage,
    ModelRequest,
    ModelVersion,
    OutputPage,
)
from shoal_service.core.access import Permission, Principal
from shoal_service.store import (
    CheckpointConflict,
    CheckpointKept,
    CheckpointNotFound,
    Conflict,
    JobEnded,
    JobNotFound,
    NotFound,
    ProjectNotFound,
    Transaction,
    checkpoint_rows,
    models,
)
from shoal_service.views import CheckpointState, CheckpointView, Page, VerificationState, VerificationView
from shoal_workers.contract import IMAGE_FILE, MAX_FILES, MEDIA_TYPES, CheckpointName, is_file_name
from shoal_workers.contract.data_preview import DataPreview

_IMAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, max-age=3600",
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_IMAGES: dict[int | str, dict[str, Any]] = {200: {"content": dict.fromkeys(MEDIA_TYPES.values(), _BINARY)}}
Project = Annotated[str, Path(pattern=PROJECT_NAME, description="Project of the model.")]
Name = Annotated[str, Path(pattern=MODEL_NAME, description="Name of the model.")]
Alias = Annotated[str, Path(pattern=ALIAS_NAME, description="An alias; it begins with a letter.")]
Version = Annotated[int, Path(ge=1, le=2**31 - 1, description="Number of a version.")]
IfNoneMatch = Annotated[
    str | None,
    Header(alias="If-None-Match", max_length=1024, description="ETags that the client has: 304 if one is the present."),
]
_TAGGED: dict[int | str, dict[str, Any]] = {304: {"description": "If-None-Match names its present ETag."}}
Which = Annotated[str, Path(pattern=MODEL_NAME, description="A version, an alias, or `latest`.")]


_MODEL = {"job": "job-2f8xq0a1b3cd", "step": 1000, "description": "the first one that is served"}

router = JsonRouter("/v1", "artifacts")


@router.route(
    "GET /jobs/{job_id}/media",
    Permission.JOBS_READ,
    "Images, histograms, tables and texts of a job",
    raises=[JobNotFound],
)
async def media(
    context: AppContext,
    job: Job,
    step: Annotated[int | None, Query(ge=0, le=2**53, description="Only records of this step.")] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="The newest ones.")] = 50,
    spread: Annotated[
        bool, Query(description="Those of evenly spaced steps of the whole run, instead of the newest ones.")
    ] = False,
) -> MediaPage:
    """Returns all steps that have media, and the records of one step, or the newest ones. They are read from the
    job's storage; a step that was done again after a failure has what it has logged the last time."""
    return await context.storage.media(job, step, limit, is_spread=spread)


@router.route(
    "GET /jobs/{job_id}/data",
    Permission.JOBS_READ,
    "What a job reads",
    raises=[JobNotFound],
)
async def data(context: AppContext, job: Job) -> DataPreview:
    """Returns samples with the tokens in the loss, lengths, labels, and what is left out, of each split. Rank 0 of a
    job with a task stores it before the first step, unless `media.enabled` is false; until then there is no split."""
    return await context.storage.data_preview(job)


@router.route(
    "GET /jobs/{job_id}/media/{file}",
    Permission.JOBS_READ,
    "An image of a job",
    responses=_IMAGES,
    raises=[JobNotFound, NotFound],
)
async def media_file(
    context: AppContext,
    job: Job,
    job_id: JobId,
    file: Annotated[str, Path(pattern=IMAGE_FILE.pattern, description="The `file` of an image of a record.")],
) -> Response:
    """Returns a PNG, JPEG, GIF or WebP file from the job's storage."""
    data = await context.storage.media_file(job, file)
    if data is None:
        raise NotFound(
            f"{file} is not in the storage of job {job_id}: its step may have been thinned out (media.max_steps)."
        )
    return Response(data, media_type=MEDIA_TYPES[file.rpartition(".")[2]], headers=_IMAGE_HEADERS)


@router.route(
    "GET /jobs/{job_id}/files",
    Permission.JOBS_READ,
    "Files that the program of a job has written",
    raises=[JobNotFound],
)
async def files(
    context: AppContext,
    job: Job,
    match: Annotated[
        str, Query(max_length=1024, description="Only files that match this pattern: `*.pt`, `runs/**`.")
    ] = "**",
    limit: Annotated[int, Query(ge=1, le=MAX_FILES, description="The first ones by name.")] = 1000,
) -> OutputPage:
    """Returns what was collected of the job's directory: at checkpoints, once a minute, and at the end of each
    attempt. `outputs` of the spec says what is kept."""
    return await context.storage.outputs(job, [match], limit)


@router.route(
    "GET /jobs/{job_id}/files/{name:path}",
    Permission.JOBS_READ,
    "A file that the program of a job has written",
    responses={200: {"content": {"application/octet-stream": _BINARY}}},
    raises=[JobNotFound, NotFound],
)
async def file(
    context: AppContext,
    job: Job,
    job_id: JobId,
    name: Annotated[str, Path(max_length=1100, description="The `name` of a file of the list.")],
) -> Response:
    """Returns the content of the file, always as an attachment."""
    content = await context.storage.output_file(job, name) if is_file_name(name) else None
    if content is None:
        raise NotFound(f"There is no file of this name among the files of job {job_id}.")
    length, pieces = content
    headers = {
        **_IMAGE_HEADERS,
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name.rpartition('/')[2], safe='')}",
        "Content-Length": str(length),
    }
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


@router.route(
    "GET /jobs/{job_id}/lineage",
    Permission.JOBS_READ,
    "Where the checkpoints of a job come from",
    raises=[JobNotFound],
)
def lineage(tx: Reading, caller: Caller, job_id: JobId) -> LineageView:
    """Returns the job with its spec, code, data and parent, then the job that it goes on from, and so on; and the
    versions of models that are checkpoints of the job."""
    return models.lineage(tx, job_id, caller.projects)


@router.route(
    "GET /models",
    Permission.JOBS_READ,
    "List the versions of models",
    answer=Page[ModelVersion],
    responses=_TAGGED,
)
def list_models(
    tx: Reading,
    caller: Caller,
    project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only models of this project.")] = None,
    name: Annotated[str | None, Query(pattern=MODEL_NAME, description="Only this model.")] = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Lists them by project and name, the newest version first. With If-None-Match, 304 if nothing has changed."""
    items = models.versions(tx, project=project, name=name, visible=caller.projects)
    return tagged(Page[ModelVersion](items=tuple(items)).model_dump_json(), if_none_match)


@router.route(
    "POST /models/{name}/versions",
    Permission.JOBS_CHANGE,
    "Register a checkpoint as the next version of a model",
    status=201,
    raises=[JobNotFound, CheckpointNotFound, CheckpointConflict],
)
async def register_model(
    request: Request,
    context: AppContext,
    caller: Caller,
    name: Name,
    model: Annotated[ModelRequest, body(ModelRequest, _MODEL)],
) -> ModelVersion:
    """The model is that of this name in the project of the job; its first version makes it. Nothing deletes the
    checkpoint while it is registered. A checkpoint that is registered already keeps its version. Idempotent."""
    await require_visible(request, model.job)
    store = context.store
    job = await run_in_threadpool(store.get_job, model.job)
    checkpoint = CheckpointName.parse((await run_in_threadpool(store.reading(models.chosen), model)).name)
    assert checkpoint is not None
    data = await context.storage.data_hash(job, checkpoint)
    exact = model.model_copy(update={"step": checkpoint.step})
    save = partial(store.writing(models.register), name, exact, data=data, by=caller.name, now=context.clock())
    return models.shown(await run_in_threadpool(save), caller.projects)


@router.route(
    "GET /models/{project}/{name}/{which}",
    Permission.JOBS_READ,
    "A version of a model, by number or alias",
    answer=ModelVersion,
    responses=_TAGGED,
    raises=[ProjectNotFound, NotFound],
)
def get_model(
    tx: Reading, caller: Caller, project: Project, name: Name, which: Which, if_none_match: IfNoneMatch = None
) -> Response:
    """Returns where its checkpoint is, and its lineage. Serving asks for `prod` here, again and again with
    If-None-Match: the answer is 304 until the alias names another version, or this version changes."""
    _require_project(caller, project)
    version = models.shown(models.find(tx, project, name, which), caller.projects)
    return tagged(version.model_dump_json(), if_none_match)


@router.route(
    "PUT /models/{project}/{name}/aliases/{alias}",
    Permission.JOBS_CHANGE,
    "Let an alias name a version",
    raises=[ProjectNotFound, NotFound],
)
def set_alias(
    tx: Writing,
    caller: Caller,
    project: Project,
    name: Name,
    alias: Alias,
    target: Annotated[AliasRequest, body(AliasRequest, {"version": 3})],
) -> ModelVersion:
    """The alias names this version from now on, instead of another one. Idempotent."""
    _require_project(caller, project)
    return models.shown(models.set_alias(tx, project, name, alias, target.version), caller.projects)


@router.route(
    "DELETE /models/{project}/{name}/aliases/{alias}",
    Permission.JOBS_CHANGE,
    "Delete an alias",
    status=204,
    raises=[ProjectNotFound, NotFound],
)
def remove_alias(tx: Writing, caller: Caller, project: Project, name: Name, alias: Alias) -> None:
    """The version stays."""
    _require_project(caller, project)
    models.remove_alias(tx, project, name, alias)


@router.route(
    "DELETE /models/{project}/{name}/versions/{version}",
    Permission.JOBS_CHANGE,
    "Take a version out of the registry",
    status=204,
    raises=[ProjectNotFound, NotFound],
)
def remove_version(tx: Writing, caller: Caller, project: Project, name: Name, version: Version) -> None:
    """Its aliases are deleted too, and its number is not given again. The checkpoint stays until its job's
    retention, or a user, deletes it."""
    _require_project(caller, project)
    models.remove(tx, project, name, version)


def _require_project(caller: Principal, project: str) -> None:
    """Raises ProjectNotFound."""
    if not caller.sees(project):
        raise ProjectNotFound(project)


DELETE_S = 120.0
CheckpointDirectory = Annotated[
    str,
    Path(
        pattern=r"^step-[0-9]{12,19}-a[0-9]{1,9}-g[0-9]{1,18}$",
        description="Name of the checkpoint's directory: step-000000000120-a1-g3.",
    ),
]

checkpoint_router = JsonRouter(
    "/v1/jobs/{job_id}/checkpoints/{name}", "histories", raises=[JobNotFound, CheckpointNotFound]
)


@checkpoint_router.route("PUT /pin", Permission.JOBS_CHANGE, "Pin a checkpoint", raises=[Conflict, CheckpointConflict])
def pin_checkpoint(tx: Writing, context: AppContext, job_id: JobId, name: CheckpointDirectory) -> CheckpointView:
    """Retention does not delete it from now on; `checkpoint.keep` counts as before. A running attempt learns of it
    within a second, and may have deleted the checkpoint until then. Idempotent."""
    return checkpoint_rows.pin(tx, job_id, _parse_name(job_id, name), is_pinned=True, now=context.clock())


@checkpoint_router.route(
    "DELETE /pin", Permission.JOBS_CHANGE, "Take the pin of a checkpoint away", raises=[Conflict, CheckpointConflict]
)
def unpin_checkpoint(tx: Writing, context: AppContext, job_id: JobId, name: CheckpointDirectory) -> CheckpointView:
    """Retention deletes it after the next commit, if enough others are newer. Idempotent."""
    return checkpoint_rows.pin(tx, job_id, _parse_name(job_id, name), is_pinned=False, now=context.clock())


@checkpoint_router.route(
    "POST /verify", Permission.JOBS_CHANGE, "Verify a checkpoint", raises=[JobEnded, Conflict, CheckpointConflict]
)
async def verify_checkpoint(
    context: AppContext,
    job: Job,
    job_id: JobId,
    name: CheckpointDirectory,
    wait: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="Seconds to wait for the end.")] = 0,
) -> VerificationView:
    """Reads every byte of it once and compares lengths and checksums with its marker. Begins the verification, or
    joins the one that runs, and answers with how far it is after at most `wait` seconds; repeat the request while
    `state` is `running`. A checkpoint that is found damaged has this state from now on. Training is not touched.
    """
    store, parsed = context.store, _parse_name(job_id, name)
    await run_in_threadpool(store.reading(_require_stored), job_id, parsed)
    view = await context.verifications.verify(job_id, context.storage.catalog(job), parsed, wait_s=wait)
    if view.state is VerificationState.DAMAGED:
        note = partial(store.writing(checkpoint_rows.note_damage), message=view.message, now=context.clock())
        await run_in_threadpool(note, job_id, parsed)
    return view


@checkpoint_router.route(
    "DELETE",
    Permission.JOBS_CHANGE,
    "Delete a checkpoint",
    raises=[CheckpointConflict, CheckpointKept, JobEnded, Conflict],
)
async def delete_checkpoint(context: AppContext, job: Job, job_id: JobId, name: CheckpointDirectory) -> CheckpointView:
    """The checkpoint is deleted from the storage at once; this cannot be undone. The request is refused for a
    pinned one, and for the newest good one of a job that has not ended. The list keeps its row, with state
    `deleted`."""
    store, parsed = context.store, _parse_name(job_id, name)
    await run_in_threadpool(store.reading(checkpoint_rows.check_deletion), job_id, parsed)
    await context.storage.run(partial(context.storage.catalog(job).delete, parsed), within_s=DELETE_S)
    note = store.writing(checkpoint_rows.note_deletion)
    return await run_in_threadpool(note, job_id, parsed, now=context.clock())


def _parse_name(job_id: str, name: str) -> CheckpointName:
    parsed = CheckpointName.parse(name)
    if parsed is None:  # a number with a leading zero too many
        raise CheckpointNotFound(job_id, name)
    return parsed


def _require_stored(tx: Transaction, job_id: str, name: CheckpointName) -> None:
    """Raises CheckpointNotFound, CheckpointConflict."""
    states = {row.name: row.state for row in checkpoint_rows.read_checkpoints(tx, job_id)}
    state = states.get(str(name))
    if state is None:
        raise CheckpointNotFound(job_id, str(name))
    if state not in (CheckpointState.COMMITTED, CheckpointState.DAMAGED):
        rule = "only one that is in the storage can be verified"
        raise CheckpointConflict(job_id, str(name), state, rule)
