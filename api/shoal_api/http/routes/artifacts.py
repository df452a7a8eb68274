"""Routes about what jobs leave: files, media, lineage of checkpoints, and the registry of models.

Media are written by the code of jobs. So images are answered with the type that the ending of their name allows, with a
policy that lets a browser run nothing, and the page shows everything else as text.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Header, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import needs, require_visible, visible_projects
from shoal_api.http.conditional import tagged
from shoal_api.http.context import Context, JobId
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind, ProblemError
from shoal_api.http.routes.quotas import PROJECT_NAME
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
from shoal_service.core.access import Permission
from shoal_service.store import models
from shoal_service.store.errors import ProjectNotFound
from shoal_service.views import Page
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.media import IMAGE_FILE, MEDIA_TYPES
from shoal_workers.contract.outputs import MAX_FILES, is_file_name

_IMAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, max-age=3600",
}
_IMAGES = {
    200: {"content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in MEDIA_TYPES.values()}}
}
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


def job_routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["artifacts"])
    store = context.store

    @router.get(
        "/media",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=MediaPage,
        summary="Images, histograms, tables and texts of a job",
    )
    async def media(
        job_id: JobId,
        step: Annotated[int | None, Query(ge=0, le=2**53, description="Only records of this step.")] = None,
        limit: Annotated[int, Query(ge=1, le=200, description="The newest ones.")] = 50,
        spread: Annotated[
            bool, Query(description="Those of evenly spaced steps of the whole run, instead of the newest ones.")
        ] = False,
    ) -> Response:
        """Returns all steps that have media, and the records of one step, or the newest ones. They are read from the
        job's storage; a step that was done again after a failure has what it has logged the last time."""
        job = await run_in_threadpool(store.get_job, job_id)
        page = await context.storage.media(job, step, limit, is_spread=spread)
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/media/{file}",
        dependencies=[needs(Permission.JOBS_READ)],
        response_class=Response,
        summary="An image of a job",
        responses=_IMAGES,  # type: ignore[arg-type]
    )
    async def media_file(
        job_id: JobId,
        file: Annotated[str, Path(pattern=IMAGE_FILE.pattern, description="The `file` of an image of a record.")],
    ) -> Response:
        """Returns a PNG, JPEG, GIF or WebP file from the job's storage."""
        job = await run_in_threadpool(store.get_job, job_id)
        data = await context.storage.media_file(job, file)
        if data is None:
            detail = (
                f"{file} is not in the storage of job {job_id}: its step may have been thinned out (media.max_steps)."
            )
            raise ProblemError(Kind.NOT_FOUND, detail)
        return Response(data, media_type=MEDIA_TYPES[file.rpartition(".")[2]], headers=_IMAGE_HEADERS)

    @router.get(
        "/files",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=OutputPage,
        summary="Files that the program of a job has written",
    )
    async def files(
        job_id: JobId,
        match: Annotated[
            str, Query(max_length=1024, description="Only files that match this pattern: `*.pt`, `runs/**`.")
        ] = "**",
        limit: Annotated[int, Query(ge=1, le=MAX_FILES, description="The first ones by name.")] = 1000,
    ) -> Response:
        """Returns what was collected of the job's directory: at checkpoints, once a minute, and at the end of each
        attempt. `outputs` of the spec says what is kept."""
        job = await run_in_threadpool(store.get_job, job_id)
        page = await context.storage.outputs(job, [match], limit)
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/files/{name:path}",
        dependencies=[needs(Permission.JOBS_READ)],
        response_class=Response,
        summary="A file that the program of a job has written",
        responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def file(
        job_id: JobId, name: Annotated[str, Path(max_length=1100, description="The `name` of a file of the list.")]
    ) -> Response:
        """Returns the content of the file, always as an attachment."""
        job = await run_in_threadpool(store.get_job, job_id)
        found = await context.storage.output_file(job, name) if is_file_name(name) else None
        if found is None:
            raise ProblemError(Kind.NOT_FOUND, f"There is no file of this name among the files of job {job_id}.")
        length, pieces = found
        headers = {
            **_IMAGE_HEADERS,
            "Cache-Control": "private, no-cache",
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name.rpartition('/')[2], safe='')}",
            "Content-Length": str(length),
        }
        return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)

    @router.get(
        "/lineage",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=LineageView,
        summary="Where the checkpoints of a job come from",
    )
    async def lineage(request: Request, job_id: JobId) -> Response:
        """Returns the job with its spec, code, data and parent, then the job that it goes on from, and so on; and the
        versions of models that are checkpoints of the job."""
        view = await run_in_threadpool(store.reading(models.lineage), job_id, visible_projects(request))
        return Response(view.model_dump_json(), media_type="application/json")

    return router


def model_routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["artifacts"])
    store = context.store

    @router.get(
        "",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[ModelVersion],
        summary="List the versions of models",
        responses=_TAGGED,
    )
    async def list_models(
        request: Request,
        project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only models of this project.")] = None,
        name: Annotated[str | None, Query(pattern=MODEL_NAME, description="Only this model.")] = None,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """Lists them by project and name, the newest version first. With If-None-Match, 304 if nothing has changed."""
        read = partial(store.reading(models.versions), project=project, name=name, visible=visible_projects(request))
        items = await run_in_threadpool(read)
        return tagged(Page[ModelVersion](items=tuple(items)).model_dump_json(), if_none_match)

    @router.post(
        "/{name}/versions",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=ModelVersion,
        status_code=201,
        summary="Register a checkpoint as the next version of a model",
        openapi_extra=body_of("ModelRequest", JSON_TYPES),
    )
    async def register_model(request: Request, name: Name) -> Response:
        """The model is that of this name in the project of the job; its first version makes it. Nothing deletes the
        checkpoint while it is registered. A checkpoint that is registered already keeps its version. Idempotent."""
        body = await read_model(request, ModelRequest)
        await require_visible(request, body.job)
        job = await run_in_threadpool(store.get_job, body.job)
        chosen = CheckpointName.parse((await run_in_threadpool(store.reading(models.chosen), body)).name)
        assert chosen is not None
        data = await context.storage.data_hash(job, chosen)
        exact, by = body.model_copy(update={"step": chosen.step}), principal_of(request).name
        save = partial(store.writing(models.register), name, exact, data=data, by=by, now=context.clock())
        made = await run_in_threadpool(save)
        return Response(_document(request, made), 201, media_type="application/json")

    @router.get(
        "/{project}/{name}/{which}",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=ModelVersion,
        summary="A version of a model, by number or alias",
        responses=_TAGGED,
    )
    async def get_model(
        request: Request, project: Project, name: Name, which: Which, if_none_match: IfNoneMatch = None
    ) -> Response:
        """Returns where its checkpoint is, and its lineage. Serving asks for `prod` here, again and again with
        If-None-Match: the answer is 304 until the alias names another version, or this version changes."""
        _require_project(request, project)
        found = await run_in_threadpool(store.reading(models.find), project, name, which)
        return tagged(_document(request, found), if_none_match)

    @router.put(
        "/{project}/{name}/aliases/{alias}",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=ModelVersion,
        summary="Let an alias name a version",
        openapi_extra=body_of("AliasRequest", JSON_TYPES),
    )
    async def set_alias(request: Request, project: Project, name: Name, alias: Alias) -> Response:
        """The alias names this version from now on, instead of another one. Idempotent."""
        _require_project(request, project)
        body = await read_model(request, AliasRequest)
        found = await run_in_threadpool(store.writing(models.set_alias), project, name, alias, body.version)
        return Response(_document(request, found), media_type="application/json")

    @router.delete(
        "/{project}/{name}/aliases/{alias}",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        status_code=204,
        summary="Delete an alias",
    )
    async def remove_alias(request: Request, project: Project, name: Name, alias: Alias) -> Response:
        """The version stays."""
        _require_project(request, project)
        await run_in_threadpool(store.writing(models.remove_alias), project, name, alias)
        return Response(status_code=204)

    @router.delete(
        "/{project}/{name}/versions/{version}",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        status_code=204,
        summary="Take a version out of the registry",
    )
    async def remove_version(request: Request, project: Project, name: Name, version: Version) -> Response:
        """Its aliases are deleted too, and its number is not given again. The checkpoint stays until its job's
        retention, or a user, deletes it."""
        _require_project(request, project)
        await run_in_threadpool(store.writing(models.remove), project, name, version)
        return Response(status_code=204)

    return router


def _document(request: Request, one: ModelVersion) -> str:
    return models.shown(one, visible_projects(request)).model_dump_json()


def _require_project(request: Request, project: str) -> None:
    if not principal_of(request).sees(project):
        raise ProjectNotFound(project)
