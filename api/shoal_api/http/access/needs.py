"""What each route needs: a permission, or nothing. Every route declares it, else `create_app` fails.

    @router.get("/{job_id}", dependencies=[needs(Permission.JOBS_READ)])

A route about a job (its path has `job_id`) is about a job of the principal's projects: for the principal there is no
other. What lists jobs takes `visible_projects`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from shoal_api.http.access.authentication import ATTEMPT, CHANGES, PRINCIPAL, principal_of, unauthenticated
from shoal_api.http.problems import Kind, ProblemError
from shoal_service.core.access import Permission, refusal_of
from shoal_service.home import AttemptCaller
from shoal_service.store import job_deletion
from shoal_service.store.audit import CURRENT
from shoal_service.store.errors import JobNotFound


class Needs:
    """A dependency of a route. `permission` None: anyone may ask."""

    def __init__(self, permission: Permission | None) -> None:
        self.permission = permission

    async def __call__(self, request: Request) -> None:
        deed = CURRENT.get()
        if deed is not None:
            deed.operation = f"{request.method} {request.scope['route'].path}"
            deed.job_id = request.path_params.get("job_id", "")
        # a POST that only checks a spec or plans a layout changes nothing, so it is no deed for the audit
        request.scope[CHANGES] = self.permission is not Permission.SPECS_CHECK
        if self.permission is None:
            return
        caller: AttemptCaller | None = request.scope.get(ATTEMPT)
        if caller is not None:
            raise ProblemError(Kind.FORBIDDEN, f"The token is that of {_named(caller)}, and may do nothing else.")
        principal = principal_of(request)
        refusal = refusal_of(principal, self.permission)
        if refusal is not None:
            raise ProblemError(Kind.FORBIDDEN, refusal.reason)
        cluster = request.path_params.get("cluster")
        if cluster is not None and principal.cluster not in ("", cluster):
            detail = f"The token is of the cluster {principal.cluster!r}: join with --name {principal.cluster}."
            raise ProblemError(Kind.FORBIDDEN, detail)
        job_id = request.path_params.get("job_id")
        if job_id is not None and principal.projects is not None:
            await require_visible(request, job_id)


class OfAttempt(Needs):
    """A dependency of a route that the supervisor of an attempt calls: its path has `job_id` and `attempt`."""

    def __init__(self) -> None:
        super().__init__(Permission.ATTEMPT_SERVE)

    async def __call__(self, request: Request) -> None:
        caller: AttemptCaller | None = request.scope.get(ATTEMPT)
        if caller is None:
            if request.scope.get(PRINCIPAL) is None:
                raise unauthenticated("This needs the token of the attempt.")
            await super().__call__(request)
        elif request.path_params != {"job_id": caller.job_id, "attempt": str(caller.attempt)}:
            raise ProblemError(Kind.FORBIDDEN, f"The token is that of {_named(caller)}, not of this attempt.")


def _named(caller: AttemptCaller) -> str:
    return f"attempt {caller.attempt} of job {caller.job_id}"


OF_ATTEMPT = Depends(OfAttempt())
"""The dependency of a route that takes only the token of the attempt in its path."""


def caller_of(request: Request) -> AttemptCaller:
    """Return the supervisor that makes the request. The route has OF_ATTEMPT."""
    caller: AttemptCaller = request.scope[ATTEMPT]
    return caller


PUBLIC = Depends(Needs(None))
"""Dependency of a route that anyone may ask."""


class LoggedIn(Needs):
    """A dependency of a page: a visitor who is not logged in is sent to the login page, which leads back."""

    async def __call__(self, request: Request) -> None:
        if request.scope.get(PRINCIPAL) is None:
            raise LoginNeeded
        await super().__call__(request)


class LoginNeeded(Exception):
    """Answered with a redirect, see `to_login`."""


LOGGED_IN = Depends(LoggedIn(Permission.WHOAMI))
"""Dependency of a page that needs a login. The page itself has no data; the routes that it reads from check each
request."""


async def to_login(request: Request, error: Exception) -> Response:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/login#next={quote(path, safe='')}", status_code=303)


async def _leave_out() -> None:
    deed = CURRENT.get()
    if deed is not None:
        deed.is_recorded = True


def unaudited() -> Any:
    """Return the dependency of a route that a program of the service calls again and again. What it reports is no deed
    of a person, and would fill the audit."""
    return Depends(_leave_out)


def needs(permission: Permission) -> Any:
    """Return the dependency of a route that needs this permission."""
    return Depends(Needs(permission))


async def require_visible(request: Request, job_id: str) -> None:
    """Raises JobNotFound if there is no such job, or if the principal does not see its project."""
    principal = principal_of(request)
    if principal.projects is None:
        return
    project = await run_in_threadpool(request.app.state.store.reading(job_deletion.project_of), job_id)
    if not principal.sees(project):
        raise JobNotFound(job_id)


def visible_projects(request: Request) -> frozenset[str] | None:
    """Return the projects whose jobs the principal sees; None for all projects."""
    return principal_of(request).projects


Declarations = Mapping[tuple[str, str], Permission | None]
"""Permissions by method and path; None: anyone may ask."""


def declarations(routers: Iterable[APIRouter]) -> Declarations:
    """Return what the routes need. Raises AssertionError if a route declares nothing, because it would be open to
    anyone."""
    found: dict[tuple[str, str], Permission | None] = {}
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute), route
            declared = [one.dependency for one in route.dependencies if isinstance(one.dependency, Needs)]
            assert declared, f"the route {route.path} declares no needs(...)"
            found |= {(method, route.path_format): declared[0].permission for method in route.methods or ()}
    return found
