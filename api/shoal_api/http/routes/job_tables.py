"""Routes behind the table of jobs: the names that its conditions, orders and columns can use, and its saved views."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import needs, visible_projects
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_model, selection_of
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind, ProblemError
from shoal_api.http.routes.curves import NO_METRIC
from shoal_api.http.routes.quotas import PROJECT_NAME
from shoal_service.core.access import Permission
from shoal_service.fleet_views import JobFields, PanelKind, SavedView, TableView, Workspace
from shoal_service.store import job_tables
from shoal_service.store.errors import ProjectNotFound
from shoal_service.store.many_curves import is_metric
from shoal_service.views import Page

Project = Annotated[str, Path(pattern=PROJECT_NAME, description="Name of a project.")]
ViewName = Annotated[
    str,
    Path(
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._ -]{0,61}[A-Za-z0-9])?$",
        description="At most 63 letters, digits, and inner spaces, dashes, dots and underscores.",
    ),
]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["jobs"])
    store = context.store

    @router.get(
        "/job-fields",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=JobFields,
        summary="The names that conditions, orders and columns can use",
    )
    async def job_fields(request: Request) -> Response:
        """Lists facts of jobs, the metrics and labels that jobs have, and all settings of a spec by their path. The
        last key of a setting is enough if no other path ends with it."""
        found = await run_in_threadpool(store.reading(job_tables.known_fields), visible_projects(request))
        return Response(JobFields(items=found).model_dump_json(), media_type="application/json")

    @router.get(
        "/views",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[SavedView],
        summary="List saved views of the table of jobs",
    )
    async def list_views(
        request: Request,
        project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only views of this project.")] = None,
    ) -> Response:
        """Lists them by project and name."""
        found = await run_in_threadpool(store.reading(job_tables.read_views), visible_projects(request), project)
        return Response(Page[SavedView](items=tuple(found)).model_dump_json(), media_type="application/json")

    @router.put(
        "/views/{project}/{view}",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        response_model=SavedView,
        summary="Save a view of the table of jobs",
        openapi_extra=body_of("TableView", JSON_TYPES),
    )
    async def put_view(request: Request, project: Project, view: ViewName) -> Response:
        """Saves it under this name, for all who see the project, and replaces one with the same name."""
        principal = principal_of(request)
        if not principal.sees(project):
            raise ProjectNotFound(project)
        document = await read_model(request, TableView)
        selection_of(document.where, document.sort, document.columns, archived=False, now=context.clock())
        if document.workspace is not None:
            _check_names(document.workspace, context.clock())
        save = store.writing(job_tables.put_view)
        saved = await run_in_threadpool(save, project, view, document, by=principal.name, now=context.clock())
        return Response(saved.model_dump_json(), media_type="application/json")

    @router.delete(
        "/views/{project}/{view}",
        dependencies=[needs(Permission.JOBS_CHANGE)],
        status_code=204,
        summary="Delete a saved view",
    )
    async def delete_view(request: Request, project: Project, view: ViewName) -> Response:
        """The jobs stay as they are."""
        if not principal_of(request).sees(project):
            raise ProjectNotFound(project)
        await run_in_threadpool(store.writing(job_tables.remove_view), project, view)
        return Response(status_code=204)

    return router


def _check_names(workspace: Workspace, now: float) -> None:
    """Raises ProblemError if a panel, or the group, is of something that no job can have."""
    if workspace.group:
        selection_of("", "", workspace.group, archived=False, now=now)
    for panel in workspace.panels:
        if panel.kind is PanelKind.LINES:
            if not is_metric(panel.y):
                raise ProblemError(Kind.INVALID_REQUEST, f"y={panel.y!r} of a panel: {NO_METRIC}")
        else:
            for name in filter(None, (panel.x, panel.y)):
                selection_of("", "", name, archived=False, now=now)
