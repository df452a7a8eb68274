"""Routes about access: who one is and the sessions of the page, API tokens, and the audit, which no route changes.

They never answer with a secret that is stored: a token is shown when it is made, and not again.
"""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import (
    CSRF_TOKEN,
    INVALID_TOKEN,
    SESSION_PATH,
    clear_session,
    csrf_token_of,
    principal_of,
    session_of,
    set_session,
    shown,
)
from shoal_api.http.access.needs import PUBLIC, needs
from shoal_api.http.context import MAX_SEQ, Context
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_api.http.problems import Kind, ProblemError
from shoal_service.access_views import AuditPage, NewToken, SessionLink, SessionRequest, TokenRequest, TokenView, Whoami
from shoal_service.core.access import PERMISSIONS, Permission, Principal, Refusal, refusal_of
from shoal_service.core.own_tokens import makes_own, manages
from shoal_service.store import audit, credentials
from shoal_service.store.audit import CURRENT, AuditQuery
from shoal_service.views import Page

_LINK_S = 120.0
TokenId = Annotated[str, Path(pattern=r"^[0-9a-z]{8}$", description="The id of a token: 8 characters after shoal_.")]


def session_routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["access"])
    store = context.store

    @router.get(
        "/v1/whoami", dependencies=[needs(Permission.WHOAMI)], response_model=Whoami, summary="Who makes this request"
    )
    async def whoami(request: Request) -> Response:
        """Returns name, role, projects and permissions of the token, or of the session's cookie."""
        view = _whoami(principal_of(request), request.scope.get(CSRF_TOKEN, ""))
        return Response(view.model_dump_json(), media_type="application/json")

    @router.post(
        SESSION_PATH,
        dependencies=[PUBLIC],
        status_code=201,
        response_model=Whoami,
        summary="Log a browser in",
        openapi_extra=body_of("SessionRequest", JSON_TYPES),
    )
    async def log_in(request: Request) -> Response:
        """Sets the cookie of a session, which ends with its token, at the latest after 12 hours."""
        body = await read_model(request, SessionRequest)
        now = context.clock()
        if body.token:
            principal = await shown(request.scope, context.authenticator.of_bearer(body.token), INVALID_TOKEN)
        else:
            finding = run_in_threadpool(store.writing(credentials.take_link), body.code, now=now)
            reason = "The link has been used, or is too old. `shoal open` makes a new one."
            principal = await shown(request.scope, finding, reason)
        deed = CURRENT.get()
        if deed is not None:
            deed.by(principal)
        secret = secrets.token_urlsafe(32)
        ends_at = min(now + context.session_s, principal.expires_at or now + context.session_s)
        await run_in_threadpool(store.writing(credentials.begin_session), secret, principal, now=now, ends_at=ends_at)
        view = _whoami(principal, csrf_token_of(secret))
        response = Response(view.model_dump_json(), 201, media_type="application/json")
        set_session(response, request.scope, secret, max_age_s=ends_at - now)
        return response

    @router.delete(SESSION_PATH, dependencies=[needs(Permission.WHOAMI)], status_code=204, summary="Log a browser out")
    async def log_out(request: Request) -> Response:
        """Ends the session of the cookie. Without a cookie it does nothing."""
        secret = session_of(dict(request.scope["headers"]))
        if secret is not None:
            await run_in_threadpool(store.writing(credentials.end_session), secret)
            context.authenticator.forget()
        response = Response(status_code=204)
        clear_session(response, request.scope)
        return response

    @router.post(
        "/v1/session/link",
        dependencies=[needs(Permission.WHOAMI)],
        status_code=201,
        response_model=SessionLink,
        summary="Make a link that logs a browser in",
    )
    async def make_link(request: Request) -> Response:
        """The link is valid once, for two minutes. Its session is that of the token which made the link."""
        code, now = secrets.token_urlsafe(32), context.clock()
        await run_in_threadpool(
            store.writing(credentials.begin_session),
            code,
            principal_of(request),
            now=now,
            ends_at=now + _LINK_S,
            is_link=True,
        )
        link = SessionLink(path=f"/login#code={code}", code=code, expires_at=now + _LINK_S)
        return Response(link.model_dump_json(), 201, media_type="application/json")

    return router


def _whoami(principal: Principal, csrf_token: str) -> Whoami:
    return Whoami(
        name=principal.name,
        role=principal.role,
        projects=None if principal.projects is None else tuple(sorted(principal.projects)),
        user=principal.user,
        token_id=principal.token_id,
        expires_at=principal.expires_at,
        permissions=tuple(one for one in PERMISSIONS if refusal_of(principal, one) is None),
        makes_tokens=manages(principal) or makes_own(principal),
        csrf_token=csrf_token,
    )


def token_routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/tokens", tags=["access"])
    store = context.store

    @router.post(
        "",
        dependencies=[needs(Permission.TOKENS_OWN)],
        status_code=201,
        response_model=NewToken,
        summary="Make a token",
        openapi_extra=body_of("TokenRequest", JSON_TYPES),
    )
    async def create_token(request: Request) -> Response:
        """Only this answer has the token; the service keeps its SHA-256. A token that a person other than an admin
        makes has no more rights than the person's, and ends with it: `expires_at` may be earlier than asked for. The
        token of a program makes none."""
        body, principal, now = await read_model(request, TokenRequest), principal_of(request), context.clock()
        made: NewToken | Refusal
        if manages(principal):
            create = store.writing(credentials.create_token)
            made = await run_in_threadpool(create, body, by=principal.name, now=now)
        else:
            made = await run_in_threadpool(store.writing(credentials.create_own_token), body, principal, now=now)
            if isinstance(made, Refusal):
                raise ProblemError(Kind.FORBIDDEN, made.reason)
        return Response(made.model_dump_json(), 201, media_type="application/json")

    @router.get(
        "",
        dependencies=[needs(Permission.TOKENS_OWN)],
        response_model=Page[TokenView],
        summary="List the tokens",
    )
    async def list_tokens(request: Request) -> Response:
        """Lists tokens newest first, with those that are expired or revoked, without their secrets: an admin all of
        them, a person those of the same user with no more rights, a program its own and those that it has made."""
        principal = principal_of(request)
        if manages(principal):
            found = await run_in_threadpool(store.reading(credentials.list_tokens))
        else:
            found = await run_in_threadpool(store.reading(credentials.list_own_tokens), principal)
        page = Page[TokenView](items=tuple(found))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.delete(
        "/{token_id}",
        dependencies=[needs(Permission.TOKENS_OWN)],
        response_model=TokenView,
        summary="Revoke a token",
    )
    async def revoke_token(request: Request, token_id: TokenId) -> Response:
        """The token ends at once here, and within 5 seconds on other control planes. Its sessions, and the tokens that
        were made with it, end with it. A principal revokes those that `GET /v1/tokens` lists. Idempotent."""
        principal, now = principal_of(request), context.clock()
        if manages(principal):
            view = await run_in_threadpool(store.writing(credentials.revoke_token), token_id, now=now)
        else:
            view = await run_in_threadpool(store.writing(credentials.revoke_own_token), token_id, principal, now=now)
        context.authenticator.forget()
        response = Response(view.model_dump_json(), media_type="application/json")
        if view.id == principal.token_id and CSRF_TOKEN in request.scope:
            clear_session(response, request.scope)  # the session has ended with its token
        return response

    return router


def audit_routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/audit", tags=["access"])
    store = context.store

    @router.get("", dependencies=[needs(Permission.AUDIT_READ)], response_model=AuditPage, summary="Who changed what")
    async def read_audit(
        before: Annotated[int | None, Query(ge=1, le=MAX_SEQ, description="Only older ones than this number.")] = None,
        job: Annotated[str | None, Query(max_length=64, description="Only those about this job.")] = None,
        actor: Annotated[str | None, Query(max_length=200, description="Only those of this principal.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="Events per answer.")] = 100,
    ) -> Response:
        """Lists every change through the API, and every one that was refused with 403, newest first: who, what, from
        where. A change and its record are one transaction. Nothing changes or deletes a record."""
        query = AuditQuery(before=before, job_id=job, actor=actor, limit=limit)
        found = await run_in_threadpool(store.reading(audit.read), query)
        page = AuditPage(items=tuple(found), next_before=found[-1].number if len(found) == limit else None)
        return Response(page.model_dump_json(), media_type="application/json")

    return router
