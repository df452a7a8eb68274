"""What each route needs: a permission, or nothing. Every route declares it, else `create_app` fails. `JsonRouter` makes
a `Needs` of a permission.

A route about a job (its path has `job_id`) is about a job of the principal's projects: for the principal there is no
other. What lists jobs takes those of `caller.projects`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from shoal_api.http.access.authentication import read_principal, unauthenticated
from shoal_api.http.access.request_scope import ATTEMPT, CHANGES, PRINCIPAL
from shoal_api.http.problems import Forbidden
from shoal_service.core.access import Permission, refusal_of
from shoal_service.home import AttemptCaller
from shoal_service.store import JobNotFound, job_deletion
from shoal_service.store.access import CURRENT_ENTRY


class Needs:
    """What a route asks of its caller, as a dependency. Without a `permission`, anyone may call it.

    `is_audited` False: a program of the service calls the route again and again. What it reports is no act of a
    person, and would fill the audit.
    """

    def __init__(self, permission: Permission | None, *, is_audited: bool = True) -> None:
        self.permission = permission
        self._is_audited = is_audited

    async def __call__(self, request: Request) -> None:
        entry = CURRENT_ENTRY.get()
        if entry is not None:
            entry.operation = f"{request.method} {request.scope['route'].path}"
            entry.job_id = request.path_params.get("job_id", "")
        # a POST that only checks a spec or plans a layout changes nothing, so it is no entry for the audit
        request.scope[CHANGES] = self.permission is not Permission.SPECS_CHECK
        if self.permission is None:
            return
        caller: AttemptCaller | None = request.scope.get(ATTEMPT)
        if caller is not None:
            raise Forbidden(f"The token belongs to {_describe_attempt(caller)}, and allows nothing else.")
        principal = read_principal(request)
        refusal = refusal_of(principal, self.permission)
        if refusal is not None:
            raise Forbidden(refusal.reason)
        cluster = request.path_params.get("cluster")
        if cluster is not None and principal.cluster not in ("", cluster):
            detail = f"The token is for the cluster {principal.cluster!r}: join with --name {principal.cluster}."
            raise Forbidden(detail)
        job_id = request.path_params.get("job_id")
        if job_id is not None and principal.projects is not None:
            await require_visible(request, job_id)
        if entry is not None and not self._is_audited:
            entry.is_recorded = True


class NeedsAttempt(Needs):
    """A dependency of a route that the supervisor of an attempt calls: its path has `job_id` and `attempt`."""

    def __init__(self) -> None:
        super().__init__(Permission.ATTEMPT_SERVE)

    async def __call__(self, request: Request) -> None:
        caller: AttemptCaller | None = request.scope.get(ATTEMPT)
        if caller is None:
            if request.scope.get(PRINCIPAL) is None:
                raise unauthenticated("This request needs the token of the attempt.")
            await super().__call__(request)
        elif request.path_params != {"job_id": caller.job_id, "attempt": str(caller.attempt)}:
            raise Forbidden(f"The token belongs to {_describe_attempt(caller)}, not to this attempt.")


def _describe_attempt(caller: AttemptCaller) -> str:
    return f"attempt {caller.attempt} of job {caller.job_id}"


OF_ATTEMPT = NeedsAttempt()
"""What a route needs that takes only the token of the attempt in its path. The scope then has ATTEMPT."""


PUBLIC = Needs(None)
"""What a route needs that anyone may ask."""


class NeedsLogin(Needs):
    """A dependency of a page. Without a login the visitor is sent to the login page, which leads back."""

    async def __call__(self, request: Request) -> None:
        if request.scope.get(PRINCIPAL) is None:
            raise LoginNeeded
        await super().__call__(request)


class LoginNeeded(Exception):
    """Answered with a redirect, see `redirect_to_login`."""


LOGGED_IN = NeedsLogin(Permission.WHOAMI)
"""What a page needs that only users who are logged in may open. It contains no data: the routes from
which it reads check each request."""


async def redirect_to_login(request: Request, error: Exception) -> Response:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/login#next={quote(path, safe='')}", status_code=303)


async def require_visible(request: Request, job_id: str) -> None:
    """Raises JobNotFound if there is no such job, or if the principal does not see its project."""
    principal = read_principal(request)
    if principal.projects is None:
        return
    project = await run_in_threadpool(request.app.state.context.store.reading(job_deletion.find_project), job_id)
    if not principal.sees(project):
        raise JobNotFound(job_id)


Declarations = Mapping[tuple[str, str], Permission | None]
"""Permissions by method and path; None if anyone may ask."""


def declarations(routers: Iterable[APIRouter]) -> Declarations:
    """Return what the routes need. Raises AssertionError if a route declares nothing, because it would be open to
    anyone."""
    declared_by_route: dict[tuple[str, str], Permission | None] = {}
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute), route
            declared = [
                dependency.dependency for dependency in route.dependencies if isinstance(dependency.dependency, Needs)
            ]
            assert declared, f"the route {route.path} declares no Needs"
            declared_by_route |= {(method, route.path_format): declared[0].permission for method in route.methods or ()}
    return declared_by_route
