"""Routes about the one who asks: who am I, and the session of the page, which begins with a token or a link."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import CSRF_TOKEN, INVALID_TOKEN, SESSION_PATH, principal_of, shown
from shoal_api.http.access.cookies import clear_session, csrf_token_of, session_of, set_session
from shoal_api.http.access.needs import PUBLIC, needs
from shoal_api.http.context import Context
from shoal_api.http.documents import JSON_TYPES, read_model
from shoal_api.http.openapi import body_of
from shoal_service.access_views import SessionLink, SessionRequest, Whoami
from shoal_service.core.access import PERMISSIONS, Permission, Principal, refusal_of
from shoal_service.store import credentials
from shoal_service.store.audit import CURRENT

_LINK_S = 120.0


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["access"])
    store = context.store

    @router.get(
        "/v1/whoami", dependencies=[needs(Permission.WHOAMI)], response_model=Whoami, summary="Who makes this request"
    )
    async def whoami(request: Request) -> Response:
        """Name, role, projects and permissions of the token, or of the session's cookie."""
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
        """Valid once, for two minutes. The session is that of the token which made the link."""
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
        csrf_token=csrf_token,
    )
