"""Routes about the queue, and about projects and users with their quotas.

The scheduler explains the queue in each pass, and follows a change of a quota in the next one. Limits are also checked
when a job is submitted.

There are no accounts: a job's user is what its spec names.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from starlette.responses import Response

from shoal_api.http.json_router import USER_NAME, Caller, JsonRouter, ProjectName, Reading, Writing, body, json_response
from shoal_service.core.access import Permission
from shoal_service.fleet_views import ProjectRules, ProjectView, QueueView, UserRules, UserView
from shoal_service.store import ProjectConflict, ProjectNotFound, UserNotFound, queueing
from shoal_service.views import Page

UserName = Annotated[
    str,
    Path(
        pattern=USER_NAME,
        description="At most 63 letters, digits, and inner dashes, dots, underscores and at signs.",
    ),
]
ProjectBody = Annotated[ProjectRules, body(ProjectRules, {"weight": 2.0})]

router = JsonRouter("/v1", "scheduling")


@router.route("GET /queue", Permission.JOBS_READ, "Show the queue")
def show_queue(
    tx: Reading,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Largest number of jobs.")] = 1000,
) -> QueueView:
    """Returns the queued jobs in the order in which they would start, each with the reason why it waits, the jobs
    that hold what it waits for, and its expected start; running jobs with fewer workers than they may have, and
    why; and what each project uses."""
    return queueing.view(tx, limit=limit, visible=caller.projects)


@router.route("GET /projects", Permission.JOBS_READ, "List the projects")
def list_projects(tx: Reading, caller: Caller) -> Page[ProjectView]:
    """Lists the projects that are defined, and those that have jobs, ended ones too, with their quotas and what
    they use."""
    return Page[ProjectView](items=tuple(queueing.project_views(tx, caller.projects)))


@router.route("GET /projects/{name}", Permission.JOBS_READ, "Show a project", raises=[ProjectNotFound])
def show_project(tx: Reading, caller: Caller, name: ProjectName) -> ProjectView:
    """Returns its quotas, and what its jobs use."""
    if not caller.sees(name):
        raise ProjectNotFound(name)
    return queueing.project_view(tx, name)


@router.route(
    "PUT /projects/{name}",
    Permission.QUOTAS_CHANGE,
    "Set the quotas of a project",
    answer=ProjectView,
    responses={201: {"model": ProjectView, "description": "The project was not defined before."}},
    raises=[ProjectNotFound, ProjectConflict],
)
def put_project(tx: Writing, name: ProjectName, rules: ProjectBody) -> Response:
    """Replaces all quotas: a key that is left out gets its default. Running jobs follow by shrinking; nothing is
    ended."""
    project, is_new = queueing.put_project(tx, name, rules)
    return json_response(project, 201 if is_new else 200)


@router.route(
    "DELETE /projects/{name}",
    Permission.QUOTAS_CHANGE,
    "Delete the quotas of a project",
    status=204,
    raises=[ProjectNotFound, ProjectConflict],
)
def delete_project(tx: Writing, name: ProjectName) -> None:
    """The rules of the project `default` then apply to its jobs. A project that is a parent cannot be deleted."""
    queueing.remove_project(tx, name)


@router.route("GET /users", Permission.USERS_READ, "List the users")
def list_users(tx: Reading) -> Page[UserView]:
    """Lists the users with limits of their own, and those with queued jobs or workers. The limits of the user
    `default` apply to each user without own limits."""
    return Page[UserView](items=tuple(queueing.user_views(tx)))


@router.route("GET /users/{name}", Permission.USERS_READ, "Show a user", raises=[UserNotFound])
def show_user(tx: Reading, name: UserName) -> UserView:
    """Returns the limits that apply to the user, and what the user has."""
    return queueing.user_view(tx, name)


@router.route(
    "PUT /users/{name}",
    Permission.QUOTAS_CHANGE,
    "Set the limits of a user",
    answer=UserView,
    responses={201: {"model": UserView, "description": "The user had no limits before."}},
    raises=[UserNotFound],
)
def put_user(tx: Writing, name: UserName, rules: Annotated[UserRules, body(UserRules, {"max_queued": 20})]) -> Response:
    """Replaces both limits: a key that is left out is no limit. Running jobs go on."""
    user, is_new = queueing.put_user(tx, name, rules)
    return json_response(user, 201 if is_new else 200)


@router.route(
    "DELETE /users/{name}",
    Permission.QUOTAS_CHANGE,
    "Delete the limits of a user",
    status=204,
    raises=[UserNotFound],
)
def delete_user(tx: Writing, name: UserName) -> None:
    """The limits of the user `default` then apply."""
    queueing.remove_user(tx, name)
