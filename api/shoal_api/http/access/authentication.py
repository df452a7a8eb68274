"""What each route needs: a permission, or nothing. Every route declares it, else `create_app` fails. `JsonRouter` makes
a `Needs` of a permission.

A route about a job (its path has `job_id`) is about a job of the principal's projects: for the principal there is no
other. What lists jobs takes those of `caller.projects`.

Finds who makes a request: the middleware between the edge and the routes. It puts a `Principal` into the scope, or
None.

A token that is shown and is not valid is refused at once, also for a route that needs none; a cookie that is not
valid is ignored. Principals are kept in memory for a few seconds, so that a request costs no query. A token that is
revoked through this process ends at once, through another one after these seconds. When a token was used last is
written once a minute.

The cookie of a session is HttpOnly and SameSite=Strict, and Secure under TLS. Browsers send cookies to every port of a
host, so its name has the port: two servers on one machine do not log each other's users out. The CSRF token is made
from the cookie's secret, so that nothing more is stored: only a page of this origin can read it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from http.cookies import CookieError, SimpleCookie
from typing import Generic, TypeVar
from urllib.parse import quote, urlsplit

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_api.http.access.limits import LIMITER, Limiter
from shoal_api.http.problems import Csrf, Forbidden, problem_response
from shoal_service.control.oidc import Issuer, IssuerUnreachable
from shoal_service.core.access import JwtRefused, Permission, Principal, hash_of, id_of, is_attempt_token, refusal_of
from shoal_service.home import AttemptCaller
from shoal_service.problems import ServiceError, Unauthenticated
from shoal_service.store import JobNotFound, Store, StoreUnavailable, access, job_deletion, supervisor_links
from shoal_service.store.access import CURRENT_ENTRY, DONE, AuditEntry
from shoal_workers.recently_used import RecentlyUsed


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
            raise Forbidden(f"The token is that of {_named(caller)}, and may do nothing else.")
        principal = read_principal(request)
        refusal = refusal_of(principal, self.permission)
        if refusal is not None:
            raise Forbidden(refusal.reason)
        cluster = request.path_params.get("cluster")
        if cluster is not None and principal.cluster not in ("", cluster):
            detail = f"The token is of the cluster {principal.cluster!r}: join with --name {principal.cluster}."
            raise Forbidden(detail)
        job_id = request.path_params.get("job_id")
        if job_id is not None and principal.projects is not None:
            await require_visible(request, job_id)
        if entry is not None and not self._is_audited:
            entry.is_recorded = True


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
            raise Forbidden(f"The token is that of {_named(caller)}, not of this attempt.")


def _named(caller: AttemptCaller) -> str:
    return f"attempt {caller.attempt} of job {caller.job_id}"


OF_ATTEMPT = OfAttempt()
"""What a route needs that takes only the token of the attempt in its path."""


def caller_of(request: Request) -> AttemptCaller:
    """Return the supervisor that makes the request. The route has OF_ATTEMPT."""
    caller: AttemptCaller = request.scope[ATTEMPT]
    return caller


PUBLIC = Needs(None)
"""What a route needs that anyone may ask."""


class LoggedIn(Needs):
    """A dependency of a page: a visitor who is not logged in is sent to the login page, which leads back."""

    async def __call__(self, request: Request) -> None:
        if request.scope.get(PRINCIPAL) is None:
            raise LoginNeeded
        await super().__call__(request)


class LoginNeeded(Exception):
    """Answered with a redirect, see `to_login`."""


LOGGED_IN = LoggedIn(Permission.WHOAMI)
"""What a page needs that is for those who are logged in. The page itself has no data; the routes that it reads from
check each request."""


async def to_login(request: Request, error: Exception) -> Response:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/login#next={quote(path, safe='')}", status_code=303)


async def require_visible(request: Request, job_id: str) -> None:
    """Raises JobNotFound if there is no such job, or if the principal does not see its project."""
    principal = read_principal(request)
    if principal.projects is None:
        return
    project = await run_in_threadpool(request.app.state.context.store.reading(job_deletion.project_of), job_id)
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


PRINCIPAL = "shoal.principal"
ATTEMPT = "shoal.attempt"
"""Key of the scope: the AttemptCaller of a request that has shown the token of an attempt. It is no principal."""
CSRF_TOKEN = "shoal.csrf_token"
"""Key of the scope, which is there if the principal comes from a cookie."""
STILL_VALID = "shoal.still_valid"
"""Key of the scope: a function that asks again whether the token or the session of the request is valid. Streams call
it."""
CHANGES = "shoal.changes"
"""Key of the scope: the route changes something, also if it writes no row."""
SESSION_PATH = "/v1/session"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ENDED_ATTEMPT = "The token is not that of an attempt that goes on: it ends with its attempt, or when another is made."
INVALID_TOKEN = "The token is unknown, expired or revoked."
_TOO_MANY = 429
_CACHE_S = 5.0
_MAX_CACHED = 10_000
_USE_S = 60.0
_log = logging.getLogger(__name__)
HOW_TO_LOG_IN = (
    "Show a token in the header Authorization: Bearer TOKEN. On the server's machine `shoal` reads it from the state "
    "directory (SHOAL_STATE_DIR, else the default one); elsewhere set SHOAL_TOKEN, or use `shoal login`."
)
_Caller = TypeVar("_Caller", Principal, AttemptCaller)
_NAME = "shoal-session"


class _Memory(Generic[_Caller]):
    """Whom secrets stand for, as it was a few seconds ago at most."""

    def __init__(self, mono: Callable[[], float]) -> None:
        self._mono = mono
        self._entries: RecentlyUsed[str, tuple[_Caller | None, float]] = RecentlyUsed(_MAX_CACHED)

    async def find(self, secret: str, read: Callable[[str], Awaitable[_Caller | None]]) -> _Caller | None:
        """Return what `read` returns for the secret, or has returned."""
        digest, now_mono = hash_of(secret), self._mono()
        caller, read_mono = self._entries.get(digest) or (None, -math.inf)
        if now_mono - read_mono > _CACHE_S:
            caller = await read(secret)
            self._entries.put(digest, (caller, now_mono))
        return caller

    def forget(self) -> None:
        self._entries.clear()


class Authenticator:
    """Finds the principal of a token. Its methods are called on the event loop."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.time,
        issuer: Issuer | None = None,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._issuer = issuer
        self._clock = clock
        self._mono = mono
        self._principals: _Memory[Principal] = _Memory(mono)
        self._attempts: _Memory[AttemptCaller] = _Memory(mono)
        self._used: dict[str, float] = {}
        self._written_mono = self._mono()

    async def authenticate_cookie(self, secret: str) -> Principal | None:
        """Return the principal of a session; None if the session has ended."""
        return await self._find(secret, self._stored(self._store.reading(access.find_principal_by_session)))

    async def authenticate_bearer(self, token: str) -> Principal | None:
        """Return the principal of a token; None if the token is not valid. Raises Unauthenticated with the reason if a
        JWT is not valid."""
        if id_of(token) is None:
            return await self._authenticate_jwt(token) if self._issuer is not None and token.count(".") == 2 else None
        return await self._find(token, self._stored(self._store.reading(access.find_principal_by_token)))

    async def authenticate_attempt(self, token: str) -> AttemptCaller | None:
        """Return the attempt of a token, as it was a few seconds ago at most; None if no attempt that goes on has this
        token. What a report changes is checked again when it is stored."""
        read = self._store.reading(supervisor_links.attempt_of_token)
        return await self._attempts.find(token, lambda secret: run_in_threadpool(read, secret))

    def forget(self) -> None:
        """Read all tokens and sessions again, because one has changed."""
        self._principals.forget()

    async def note(self, entry: AuditEntry, outcome: str) -> None:
        """Write an entry into the audit. Never raises: the request is answered already."""
        try:
            await run_in_threadpool(self._store.writing(access.record_refusal), entry, outcome)
        except StoreUnavailable:
            _log.warning("access.not_audited", extra={"operation": entry.operation, "actor": entry.actor})

    async def write_uses(self) -> None:
        """Write when tokens were used, at most once a minute and when the server stops. Never raises."""
        used, self._used = self._used, {}
        self._written_mono = self._mono()
        if used:
            try:
                await run_in_threadpool(self._store.writing(access.note_use), used)
            except StoreUnavailable:
                _log.warning("access.uses_not_written", extra={"tokens": len(used)})

    async def _authenticate_jwt(self, token: str) -> Principal | None:
        issuer = self._issuer
        assert issuer is not None
        try:
            return await self._find(token, issuer.verify)
        except JwtRefused as error:
            raise unauthenticated(f"The token of the issuer is refused: {error}") from None

    def _stored(self, read: Callable[..., Principal | None]) -> Callable[[str], Awaitable[Principal | None]]:
        return lambda secret: run_in_threadpool(read, secret, now=self._clock())

    async def _find(self, secret: str, read: Callable[[str], Awaitable[Principal | None]]) -> Principal | None:
        principal, now_mono = await self._principals.find(secret, read), self._mono()
        if principal is not None and principal.token_id:
            self._used[principal.token_id] = self._clock()
            if now_mono - self._written_mono > _USE_S:
                self._written_mono = now_mono  # before the task runs, so that no request meanwhile starts a second one
                task = asyncio.create_task(self.write_uses())
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if principal is None or (principal.expires_at is not None and principal.expires_at <= self._clock()):
            return None
        return principal


class Authentication:
    """The middleware. It authenticates, limits and audits each request."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, limiter: Limiter) -> None:
        self._app = app
        self._authenticator = authenticator
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            with self._limiter.request():
                scope[LIMITER] = self._limiter
                principal = scope[PRINCIPAL] = await self._principal(scope)
                scope[STILL_VALID] = partial(self._is_still_valid, dict(scope["headers"]))
                self._limiter.admit(scope)
                if scope["method"] in SAFE_METHODS or ATTEMPT in scope:  # reports are no deeds of people
                    await self._app(scope, receive, send)
                else:
                    await self._audited(scope, receive, send, principal)
        except ServiceError as error:  # of this middleware: those of routes are answered below it
            await problem_response(error, scope["path"])(scope, receive, send)

    async def _audited(self, scope: Scope, receive: Receive, send: Send, principal: Principal | None) -> None:
        """Serve a request that may change something, and audit it as an act of the principal."""
        client = scope.get("client")
        operation = f"{scope['method']} {scope['path']}"[:200]  # until its route is known, see needs.py
        entry = AuditEntry(at=time.time(), address=client[0] if client else "", operation=operation, path=scope["path"])
        if principal is not None:
            entry.set_actor(principal)
        status, body = 0, b""

        async def send_noted(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
            elif 400 <= status < 500:
                body += message.get("body", b"")
            await send(message)

        token = CURRENT_ENTRY.set(entry)
        try:
            await self._app(scope, receive, send_noted)
        finally:
            CURRENT_ENTRY.reset(token)
            is_noted = status == 403 or (scope.get(CHANGES, False) and (status < 300 or 400 <= status < 500))
            if not entry.is_recorded and entry.actor and is_noted and status != _TOO_MANY:
                await self._authenticator.note(entry, DONE if status < 300 else _code(body))

    async def _principal(self, scope: Scope) -> Principal | None:
        headers = dict(scope["headers"])
        header = headers.get(b"authorization")
        if header is None:
            return await self._of_cookie(scope, headers)
        scheme, _, token = header.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            self._limiter.failed(scope)
            raise unauthenticated(f"Authorization has the scheme {scheme[:20]!r}, not Bearer.")
        if is_attempt_token(token.strip()):
            scope[ATTEMPT] = await require_valid(
                scope, self._authenticator.authenticate_attempt(token.strip()), ENDED_ATTEMPT
            )
            return None
        return await require_valid(scope, self._authenticator.authenticate_bearer(token.strip()), INVALID_TOKEN)

    async def _is_still_valid(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether the token or session of a stream is still valid. A database or an issuer that does not answer
        ends no stream."""
        header, secret = headers.get(b"authorization"), session_of(headers)
        try:
            if header is not None:
                token = header.decode("latin-1").partition(" ")[2].strip()
                return await self._authenticator.authenticate_bearer(token) is not None
            return secret is not None and await self._authenticator.authenticate_cookie(secret) is not None
        except ServiceError as error:
            return isinstance(error, IssuerUnreachable | StoreUnavailable)

    async def _of_cookie(self, scope: Scope, headers: dict[bytes, bytes]) -> Principal | None:
        secret = session_of(headers)
        if secret is None:
            return None
        principal = await self._authenticator.authenticate_cookie(secret)
        if principal is None or (scope["path"] == SESSION_PATH and scope["method"] == "POST"):
            return None  # who logs in shows a token
        scope[CSRF_TOKEN] = expected = csrf_token_of(secret)
        if scope["method"] not in SAFE_METHODS:
            given = headers.get(b"x-csrf-token", b"")
            if not hmac.compare_digest(given, expected.encode()):
                detail = "The header X-CSRF-Token is missing or wrong. Load the page again."
                raise Csrf(detail)
        return principal


async def require_valid(scope: Scope, finding: Awaitable[_Caller | None], reason: str) -> _Caller:
    """Return whom a secret of a request stands for.

    A secret that is not valid counts against the address of the request. Raises Unauthenticated with `reason`, or
    TooManyRequests if too many secrets of the address were not valid.
    """
    limiter: Limiter = scope[LIMITER]
    try:
        principal = await finding
    except (Unauthenticated, IssuerUnreachable):
        limiter.failed(scope)
        raise
    if principal is None:
        limiter.failed(scope)
        raise unauthenticated(reason)
    return principal


def unauthenticated(reason: str) -> Unauthenticated:
    return Unauthenticated(f"{reason} {HOW_TO_LOG_IN}", headers={"WWW-Authenticate": 'Bearer realm="shoal"'})


def read_principal(request: Request) -> Principal:
    """Return the principal of a request whose route needs one. Raises Unauthenticated."""
    principal: Principal | None = request.scope.get(PRINCIPAL)
    if principal is None:
        raise unauthenticated("This needs a token.")
    return principal


def _code(body: bytes) -> str:
    """Return the code of a problem document."""
    try:
        return str(json.loads(body)["code"])
    except (ValueError, LookupError, TypeError):
        return "refused"


def session_of(headers: dict[bytes, bytes]) -> str | None:
    """Return the secret in the cookie of this server."""
    cookies = headers.get(b"cookie")
    if cookies is None:
        return None
    try:
        cookie = SimpleCookie(cookies.decode("latin-1")).get(_name(headers))
    except CookieError:
        return None
    return cookie.value if cookie is not None and cookie.value else None


def set_session(response: Response, scope: Scope, secret: str, *, max_age_s: float) -> None:
    response.set_cookie(
        _name(dict(scope["headers"])),
        secret,
        max_age=int(max_age_s),
        httponly=True,
        secure=scope["scheme"] == "https",
        samesite="strict",
    )


def clear_session(response: Response, scope: Scope) -> None:
    name = _name(dict(scope["headers"]))
    response.delete_cookie(name, httponly=True, secure=scope["scheme"] == "https", samesite="strict")


def csrf_token_of(secret: str) -> str:
    return hash_of(f"csrf:{secret}")[:32]


def _name(headers: dict[bytes, bytes]) -> str:
    try:
        port = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").port
    except ValueError:
        port = None
    return _NAME if port is None else f"{_NAME}-{port}"
