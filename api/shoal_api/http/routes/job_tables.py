"""Routes behind the table of jobs: the names that its conditions, orders and columns can use, and its saved views."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from shoal_api.http.documents import body
from shoal_api.http.json_router import AppContext, Caller, JsonRouter, Reading, Writing
from shoal_api.http.parameters import PROJECT_NAME, selection_of
from shoal_api.http.problems import InvalidRequest
from shoal_api.http.routes.curves import NO_METRIC
from shoal_service.core.access import Permission
from shoal_service.fleet_views import JobFields, PanelKind, SavedView, TableView, Workspace
from shoal_service.store import Conflict, NotFound, ProjectNotFound, job_tables
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
_EXAMPLE = {"where": "loss < 2 and not archived", "sort": "loss", "columns": "optimizer.lr,label.team"}

router = JsonRouter("/v1", "jobs")


@router.route("GET /job-fields", Permission.JOBS_READ, "The names that conditions, orders and columns can use")
def job_fields(tx: Reading, caller: Caller) -> JobFields:
    """Lists facts of jobs, the metrics and labels that jobs have, and all settings of a spec by their path. The
    last key of a setting is enough if no other path ends with it."""
    return JobFields(items=job_tables.known_fields(tx, caller.projects))


@router.route("GET /views", Permission.JOBS_READ, "List saved views of the table of jobs")
def list_views(
    tx: Reading,
    caller: Caller,
    project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only views of this project.")] = None,
) -> Page[SavedView]:
    """Lists them by project and name."""
    return Page[SavedView](items=tuple(job_tables.read_views(tx, caller.projects, project)))


@router.route(
    "PUT /views/{project}/{view}",
    Permission.JOBS_CHANGE,
    "Save a view of the table of jobs",
    raises=[ProjectNotFound, Conflict],
)
def put_view(
    tx: Writing,
    context: AppContext,
    caller: Caller,
    project: Project,
    view: ViewName,
    document: Annotated[TableView, body(TableView, _EXAMPLE)],
) -> SavedView:
    """Saves it under this name, for all who see the project, and replaces one with the same name."""
    if not caller.sees(project):
        raise ProjectNotFound(project)
    now = context.clock()
    selection_of(document.where, document.sort, document.columns, archived=False, now=now)
    if document.workspace is not None:
        _check_names(document.workspace, now)
    return job_tables.put_view(tx, project, view, document, by=caller.name, now=now)


@router.route(
    "DELETE /views/{project}/{view}",
    Permission.JOBS_CHANGE,
    "Delete a saved view",
    status=204,
    raises=[ProjectNotFound, NotFound],
)
def delete_view(tx: Writing, caller: Caller, project: Project, view: ViewName) -> None:
    """The jobs stay as they are."""
    if not caller.sees(project):
        raise ProjectNotFound(project)
    job_tables.remove_view(tx, project, view)


def _check_names(workspace: Workspace, now: float) -> None:
    """Raises InvalidRequest if a panel, or the group, is of something that no job can have."""
    if workspace.group:
        selection_of("", "", workspace.group, archived=False, now=now)
    for panel in workspace.panels:
        if panel.kind is PanelKind.LINES:
            if not is_metric(panel.y):
                raise InvalidRequest(f"y={panel.y!r} of a panel: {NO_METRIC}")
        else:
            for name in filter(None, (panel.x, panel.y)):
                selection_of("", "", name, archived=False, now=now)
