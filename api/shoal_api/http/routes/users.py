"""Routes for users and their limits. Limits are checked at submit and in the next pass of the scheduler.

There are no accounts: a job's user is what its spec names.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_service.core.access import Permission
from shoal_service.fleet_views import UserRules, UserView
from shoal_service.store import quotas
from shoal_service.views import Page

USER_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._@-]{0,61}[A-Za-z0-9])?$"
UserName = Annotated[
    str,
    Path(
        pattern=USER_NAME,
        description="At most 63 letters, digits, and inner dashes, dots, underscores and at signs.",
    ),
]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/users", tags=["scheduling"])
    store = context.store

    @router.get(
        "", dependencies=[needs(Permission.USERS_READ)], response_model=Page[UserView], summary="List the users"
    )
    async def list_users() -> Response:
        """Those with limits of their own, and those with queued jobs or workers. The limits of the user `default`
        apply to each user without own limits."""
        page = Page[UserView](items=tuple(await run_in_threadpool(store.reading(quotas.user_views))))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get("/{name}", dependencies=[needs(Permission.USERS_READ)], response_model=UserView, summary="Show a user")
    async def show_user(name: UserName) -> Response:
        """The limits that apply to the user, and what the user has."""
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
