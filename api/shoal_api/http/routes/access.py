"""Routes about access: who one is and the sessions of the page, API tokens, and the audit, which no route changes.

They never answer with a secret that is stored: a token is shown when it is made, and not again.
"""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.authentication import (
    INVALID_TOKEN,
    clear_session,
    make_csrf_token,
    read_session_secret,
    require_valid,
    set_session,
)
from shoal_api.http.access.needs import PUBLIC
from shoal_api.http.access.request_scope import CSRF_TOKEN
from shoal_api.http.json_router import MAX_SEQ, AppContext, Caller, JsonRouter, Reading, Writing, json_response
from shoal_api.http.problems import Forbidden
from shoal_api.http.request_bodies import body
from shoal_service.access_views import AuditPage, NewToken, SessionLink, SessionRequest, TokenRequest, TokenView, Whoami
from shoal_service.core.access import PERMISSIONS, Permission, Principal, Refusal, makes_own, manages, refusal_of
from shoal_service.store import TokenNotFound, access
from shoal_service.store.access import CURRENT_ENTRY, AuditQuery
from shoal_service.views import Page

_LINK_S = 120.0
_TOKEN = {"name": "ada", "role": "operator", "projects": ["vision"], "expires_in_s": 2592000}
TokenId = Annotated[str, Path(pattern=r"^[0-9a-z]{8}$", description="The id of a token: 8 characters after shoal_.")]

router = JsonRouter("/v1", "access")


@router.route("GET /whoami", Permission.WHOAMI, "Who makes this request")
async def whoami(request: Request, caller: Caller) -> Whoami:
    """Returns name, role, projects and permissions of the token, or of the session's cookie."""
    return _whoami(caller, request.scope.get(CSRF_TOKEN, ""))


@router.route("POST /session", PUBLIC, "Log a browser in", answer=Whoami, status=201)
async def log_in(
    request: Request,
    context: AppContext,
    login: Annotated[SessionRequest, body(SessionRequest, {"token": "shoal_3k9d2m7q_..."})],
) -> Response:
    """Sets the cookie of a session, which ends with its token, at the latest after 12 hours."""
    store, now = context.store, context.clock()
    if login.token:
        principal = await require_valid(
            request.scope, context.authenticator.authenticate_bearer(login.token), INVALID_TOKEN
        )
    else:
        finding = run_in_threadpool(store.writing(access.take_link), login.code, now=now)
        reason = "The link has been used, or is too old. `shoal open` makes a new one."
        principal = await require_valid(request.scope, finding, reason)
    entry = CURRENT_ENTRY.get()
    if entry is not None:
        entry.set_actor(principal)
    secret = secrets.token_urlsafe(32)
    ends_at = min(now + context.session_s, principal.expires_at or now + context.session_s)
    await run_in_threadpool(store.writing(access.begin_session), secret, principal, now=now, ends_at=ends_at)
    response = json_response(_whoami(principal, make_csrf_token(secret)), 201)
    set_session(response, request.scope, secret, max_age_s=ends_at - now)
    return response


@router.route("DELETE /session", Permission.WHOAMI, "Log a browser out", answer=Response, status=204)
async def log_out(request: Request, context: AppContext) -> Response:
    """Ends the session of the cookie. Without a cookie it does nothing."""
    secret = read_session_secret(dict(request.scope["headers"]))
    if secret is not None:
        await run_in_threadpool(context.store.writing(access.end_session), secret)
        context.authenticator.forget()
    response = Response(status_code=204)
    clear_session(response, request.scope)
    return response


@router.route("POST /session/link", Permission.WHOAMI, "Make a link that logs a browser in", status=201)
def make_link(tx: Writing, context: AppContext, caller: Caller) -> SessionLink:
    """The link is valid once, for two minutes. Its session is that of the token which made the link."""
    code, now = secrets.token_urlsafe(32), context.clock()
    access.begin_session(tx, code, caller, now=now, ends_at=now + _LINK_S, is_link=True)
    return SessionLink(path=f"/login#code={code}", code=code, expires_at=now + _LINK_S)


@router.route("POST /tokens", Permission.TOKENS_OWN, "Make a token", status=201)
def create_token(
    context: AppContext, caller: Caller, token: Annotated[TokenRequest, body(TokenRequest, _TOKEN)]
) -> NewToken:
    """Only this answer has the token; the service keeps its SHA-256. A token that a person other than an admin
    makes has no more rights than the person's, and ends with it: `expires_at` may be earlier than asked for. The
    token of a program makes none."""
    store, now = context.store, context.clock()
    if manages(caller):
        return store.writing(access.create_token)(token, by=caller.name, now=now)
    token_or_refusal = store.writing(access.create_own_token)(token, caller, now=now)
    if isinstance(token_or_refusal, Refusal):
        raise Forbidden(token_or_refusal.reason)
    return token_or_refusal


@router.route("GET /tokens", Permission.TOKENS_OWN, "List the tokens")
def list_tokens(tx: Reading, caller: Caller) -> Page[TokenView]:
    """Lists tokens newest first, with those that are expired or revoked, without their secrets: an admin all of
    them, a person those of the same user with no more rights, a program its own and those that it has made."""
    tokens = access.list_tokens(tx) if manages(caller) else access.list_own_tokens(tx, caller)
    return Page[TokenView](items=tuple(tokens))


@router.route(
    "DELETE /tokens/{token_id}",
    Permission.TOKENS_OWN,
    "Revoke a token",
    answer=TokenView,
    raises=[TokenNotFound],
)
async def revoke_token(request: Request, context: AppContext, caller: Caller, token_id: TokenId) -> Response:
    """The token ends at once here, and within 5 seconds on other control planes. Its sessions, and the tokens that
    were made with it, end with it. A principal revokes those that `GET /v1/tokens` lists. Idempotent."""
    store, now = context.store, context.clock()
    if manages(caller):
        view = await run_in_threadpool(store.writing(access.revoke_token), token_id, now=now)
    else:
        view = await run_in_threadpool(store.writing(access.revoke_own_token), token_id, caller, now=now)
    context.authenticator.forget()
    response = json_response(view)
    if view.id == caller.token_id and CSRF_TOKEN in request.scope:
        clear_session(response, request.scope)  # the session has ended with its token
    return response


@router.route("GET /audit", Permission.AUDIT_READ, "Who changed what")
def read_audit(
    tx: Reading,
    before: Annotated[int | None, Query(ge=1, le=MAX_SEQ, description="Only older ones than this number.")] = None,
    job: Annotated[str | None, Query(max_length=64, description="Only those about this job.")] = None,
    actor: Annotated[str | None, Query(max_length=200, description="Only those of this principal.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Events per answer.")] = 100,
) -> AuditPage:
    """Lists every change through the API, and every one that was refused with 403, newest first: who, what, from
    where. A change and its record are one transaction. Nothing changes or deletes a record."""
    entries = access.read(tx, AuditQuery(before=before, job_id=job, actor=actor, limit=limit))
    return AuditPage(items=tuple(entries), next_before=entries[-1].number if len(entries) == limit else None)


def _whoami(principal: Principal, csrf_token: str) -> Whoami:
    return Whoami(
        name=principal.name,
        role=principal.role,
        projects=None if principal.projects is None else tuple(sorted(principal.projects)),
        user=principal.user,
        token_id=principal.token_id,
        expires_at=principal.expires_at,
        permissions=tuple(permission for permission in PERMISSIONS if refusal_of(principal, permission) is None),
        makes_tokens=manages(principal) or makes_own(principal),
        csrf_token=csrf_token,
    )
