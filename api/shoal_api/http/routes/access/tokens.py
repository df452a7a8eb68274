"""Routes about API tokens: made, listed, revoked. Only the answer to its creation has the token itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import principal_of
from shoal_api.http.access.needs import needs
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_service.access_views import NewToken, TokenRequest, TokenView
from shoal_service.core.access import Permission
from shoal_service.store import credentials
from shoal_service.views import Page

TokenId = Annotated[str, Path(pattern=r"^[0-9a-z]{8}$", description="The id of a token: 8 characters after shoal_.")]


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/tokens", tags=["access"])
    store = context.store

    @router.post(
        "",
        dependencies=[needs(Permission.TOKENS_MANAGE)],
        status_code=201,
        response_model=NewToken,
        summary="Make a token",
        openapi_extra=body_of("TokenRequest", JSON_TYPES),
    )
    async def create_token(request: Request) -> Response:
        """Only this answer has the token; the service keeps its SHA-256."""
        body = await read_model(request, TokenRequest)
        by = principal_of(request).name
        made = await run_in_threadpool(store.writing(credentials.create_token), body, by=by, now=context.clock())
        return Response(made.model_dump_json(), 201, media_type="application/json")

    @router.get(
        "",
        dependencies=[needs(Permission.TOKENS_MANAGE)],
        response_model=Page[TokenView],
        summary="List the tokens",
    )
    async def list_tokens() -> Response:
        """Newest first, with those that are expired or revoked, without their secrets."""
        page = Page[TokenView](items=tuple(await run_in_threadpool(store.reading(credentials.list_tokens))))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.delete(
        "/{token_id}",
        dependencies=[needs(Permission.TOKENS_MANAGE)],
        response_model=TokenView,
        summary="Revoke a token",
    )
    async def revoke_token(token_id: TokenId) -> Response:
        """At once here, and within 5 seconds on other control planes. Its sessions end with it. Idempotent."""
        view = await run_in_threadpool(store.writing(credentials.revoke_token), token_id, now=context.clock())
        context.authenticator.forget()
        return Response(view.model_dump_json(), media_type="application/json")

    return router
