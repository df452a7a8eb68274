"""Routes about the queue, and about projects and users with their quotas.

The scheduler explains the queue in each pass, and follows a change of a quota in the next one. Limits are also checked
when a job is submitted.

There are no accounts: a job's user is what its spec names.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import needs, visible_projects
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_service.core.access import Permission
from shoal_service.fleet_views import ProjectRules, ProjectView, QueueView, UserRules, UserView
from shoal_service.store import queueing, quotas
from shoal_service.store.errors import ProjectNotFound
from shoal_service.views import Page

PROJECT_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
ProjectName = Annotated[
    str, Path(pattern=PROJECT_NAME, description="At most 63 lower-case letters, digits and inner dashes.")
]
USER_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?$"
UserName = Annotated[
    str,
    Path(
        pattern=USER_NAME,
        description="At most 63 letters, digits, and inner dashes, dots, underscores and at signs.",
    ),
]


def project_routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["scheduling"])
    store = context.store

    @router.get(
        "/queue", dependencies=[needs(Permission.JOBS_READ)], response_model=QueueView, summary="Show the queue"
    )
    async def show_queue(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=10_000, description="Largest number of jobs.")] = 1000,
    ) -> Response:
        """Returns the queued jobs in the order in which they would start, each with the reason why it waits, the jobs
        that hold what it waits for, and its expected start; running jobs with fewer workers than they may have, and
        why; and what each project uses."""
        queue = await run_in_threadpool(store.reading(queueing.view), limit=limit, visible=visible_projects(request))
        return Response(queue.model_dump_json(), media_type="application/json")

    @router.get(
        "/projects",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[ProjectView],
        summary="List the projects",
    )
    async def list_projects(request: Request) -> Response:
        """Lists the projects that are defined, and those that have jobs, ended ones too, with their quotas and what
        they use."""
        page = Page[ProjectView](
            items=tuple(await run_in_threadpool(store.reading(quotas.project_views), visible_projects(request)))
        )
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/projects/{name}",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=ProjectView,
        summary="Show a project",
    )
    async def show_project(request: Request, name: ProjectName) -> Response:
        """Returns its quotas, and what its jobs use."""
        if not principal_of(request).sees(name):
            raise ProjectNotFound(name)
        return _project_response(await run_in_threadpool(store.reading(quotas.project_view), name))

    @router.put(
        "/projects/{name}",
        dependencies=[needs(Permission.QUOTAS_CHANGE)],
        response_model=ProjectView,
        summary="Set the quotas of a project",
        openapi_extra=body_of("ProjectRules", JSON_TYPES),
        responses={201: {"model": ProjectView, "description": "The project was not defined before."}},
    )
    async def put_project(request: Request, name: ProjectName) -> Response:
        """Replaces all quotas: a key that is left out gets its default. Running jobs follow by shrinking; nothing is
        ended."""
        rules = await read_model(request, ProjectRules)
        project, is_new = await run_in_threadpool(store.writing(quotas.put_project), name, rules)
        return _project_response(project, 201 if is_new else 200)

    @router.delete(
        "/projects/{name}",
        dependencies=[needs(Permission.QUOTAS_CHANGE)],
        status_code=204,
        summary="Delete the quotas of a project",
    )
    async def delete_project(name: ProjectName) -> Response:
        """The rules of the project `default` then apply to its jobs. A project that is a parent cannot be deleted."""
        await run_in_threadpool(store.writing(quotas.remove_project), name)
        return Response(status_code=204)

    return router


def _project_response(project: ProjectView, status: int = 200) -> Response:
    return Response(project.model_dump_json(), status, media_type="application/json")


def user_routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/users", tags=["scheduling"])
    store = context.store

    @router.get(
        "", dependencies=[needs(Permission.USERS_READ)], response_model=Page[UserView], summary="List the users"
    )
    async def list_users() -> Response:
        """Lists the users with limits of their own, and those with queued jobs or workers. The limits of the user
        `default` apply to each user without own limits."""
        page = Page[UserView](items=tuple(await run_in_threadpool(store.reading(quotas.user_views))))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get("/{name}", dependencies=[needs(Permission.USERS_READ)], response_model=UserView, summary="Show a user")
    async def show_user(name: UserName) -> Response:
        """Returns the limits that apply to the user, and what the user has."""
        return _user_response(await run_in_threadpool(store.reading(quotas.user_view), name))

    @router.put(
        "/{name}",
        dependencies=[needs(Permission.QUOTAS_CHANGE)],
        response_model=UserView,
        summary="Set the limits of a user",
        openapi_extra=body_of("UserRules", JSON_TYPES),
        responses={201: {"model": UserView, "description": "The user had no limits before."}},
    )
    async def put_user(request: Request, name: UserName) -> Response:
        """Replaces both limits: a key that is left out is no limit. Running jobs go on."""
        rules = await read_model(request, UserRules)
        user, is_new = await run_in_threadpool(store.writing(quotas.put_user), name, rules)
        return _user_response(user, 201 if is_new else 200)

    @router.delete(
        "/{name}",
        dependencies=[needs(Permission.QUOTAS_CHANGE)],
        status_code=204,
        summary="Delete the limits of a user",
    )
    async def delete_user(name: UserName) -> Response:
        """The limits of the user `default` then apply."""
        await run_in_threadpool(store.writing(quotas.remove_user), name)
        return Response(status_code=204)

    return router


def _user_response(user: UserView, status: int = 200) -> Response:
    return Response(user.model_dump_json(), status, media_type="application/json")
