"""Finds who makes a request: the middleware between the edge and the routes. It puts a `Principal` into the scope, or
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
from collections.abc import Awaitable, Callable
from functools import partial
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_api.http.access.limits import Limiter
from shoal_api.http.access.request_scope import (
    ATTEMPT,
    CHANGES,
    CSRF_TOKEN,
    LIMITER,
    PRINCIPAL,
    SAFE_METHODS,
    STILL_VALID,
)
from shoal_api.http.problems import Csrf, problem_response
from shoal_service.control.oidc import Issuer, IssuerUnreachable
from shoal_service.core.access import JwtRefused, Principal, hash_secret, is_attempt_token, parse_token_id
from shoal_service.home import AttemptCaller
from shoal_service.problems import ServiceError, Unauthenticated
from shoal_service.store import Store, StoreUnavailable, access, supervisor_links
from shoal_service.store.access import CURRENT_ENTRY, DONE, AuditEntry
from shoal_workers.recently_used import RecentlyUsed

SESSION_PATH = "/v1/session"
ENDED_ATTEMPT = "The token belongs to no running attempt: it ends with its attempt, or when a new token is made."
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


class Authenticator:
    """Finds whom a secret stands for, as it was a few seconds ago at most. Its methods are called on the event loop."""

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
        self._callers: RecentlyUsed[tuple[type, str], tuple[Any, float]] = RecentlyUsed(_MAX_CACHED)
        """Whom a secret stands for, and when that was read, by the kind of caller and the digest of the secret."""
        self._used: dict[str, float] = {}
        self._written_mono = self._mono()

    async def authenticate_cookie(self, secret: str) -> Principal | None:
        """Return the principal of a session; None if the session has ended."""
        return await self._find_principal(secret, self._from_store(access.find_principal_by_session))

    async def authenticate_bearer(self, token: str) -> Principal | None:
        """Return the principal of a token; None if the token is not valid. Raises Unauthenticated with the reason if a
        JWT is not valid."""
        if parse_token_id(token) is not None:
            return await self._find_principal(token, self._from_store(access.find_principal_by_token))
        if self._issuer is None or token.count(".") != 2:
            return None
        try:
            return await self._find_principal(token, self._issuer.verify)
        except JwtRefused as error:
            raise unauthenticated(f"The token of the issuer is refused: {error}") from None

    async def authenticate_attempt(self, token: str) -> AttemptCaller | None:
        """Return the attempt of a token; None if no attempt that goes on has this token. What a report changes is
        checked again when it is stored."""
        read = self._store.reading(supervisor_links.find_attempt_by_token)
        return await self._recall(AttemptCaller, token, lambda secret: run_in_threadpool(read, secret))

    def forget(self) -> None:
        """Read all tokens and sessions again, because one has changed."""
        self._callers.clear()

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

    def _from_store(self, find: Callable[..., Principal | None]) -> Callable[[str], Awaitable[Principal | None]]:
        read = self._store.reading(find)
        return lambda secret: run_in_threadpool(read, secret, now=self._clock())

    async def _find_principal(
        self, secret: str, read: Callable[[str], Awaitable[Principal | None]]
    ) -> Principal | None:
        principal, now_mono = await self._recall(Principal, secret, read), self._mono()
        if principal is not None and principal.token_id:
            self._used[principal.token_id] = self._clock()
            if now_mono - self._written_mono > _USE_S:
                self._written_mono = now_mono  # before the task runs, so that no request meanwhile starts a second one
                task = asyncio.create_task(self.write_uses())
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if principal is None or (principal.expires_at is not None and principal.expires_at <= self._clock()):
            return None
        return principal

    async def _recall(
        self, kind: type[_Caller], secret: str, read: Callable[[str], Awaitable[_Caller | None]]
    ) -> _Caller | None:
        """Return what `read` returns for the secret, or has returned some seconds ago."""
        # the kind keeps the token of an attempt, shown as a cookie, from being taken for a principal's secret
        key, now_mono = (kind, hash_secret(secret)), self._mono()
        caller, read_mono = self._callers.get(key) or (None, -math.inf)
        if now_mono - read_mono > _CACHE_S:
            caller = await read(secret)
            self._callers.put(key, (caller, now_mono))
        return caller


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
                principal = scope[PRINCIPAL] = await self._find_principal(scope)
                scope[STILL_VALID] = partial(self._is_still_valid, dict(scope["headers"]))
                self._limiter.admit(scope)
                if scope["method"] in SAFE_METHODS or ATTEMPT in scope:  # reports are no deeds of people
                    await self._app(scope, receive, send)
                else:
                    await self._serve_audited(scope, receive, send, principal)
        except ServiceError as error:  # of this middleware: those of routes are answered below it
            await problem_response(error, scope["path"])(scope, receive, send)

    async def _serve_audited(self, scope: Scope, receive: Receive, send: Send, principal: Principal | None) -> None:
        """Serve a request that may change something, and audit it as an act of the principal."""
        client = scope.get("client")
        operation = f"{scope['method']} {scope['path']}"[:200]  # until its route is known, see needs.py
        entry = AuditEntry(at=time.time(), address=client[0] if client else "", operation=operation, path=scope["path"])
        if principal is not None:
            entry.set_actor(principal)
        status, body = 0, b""

        async def send_and_note(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
            elif 400 <= status < 500:
                body += message.get("body", b"")
            await send(message)

        token = CURRENT_ENTRY.set(entry)
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            CURRENT_ENTRY.reset(token)
            is_recorded_here = status == 403 or (scope.get(CHANGES, False) and (status < 300 or 400 <= status < 500))
            if not entry.is_recorded and entry.actor and is_recorded_here and status != _TOO_MANY:
                await self._authenticator.note(entry, DONE if status < 300 else _read_code(body))

    async def _find_principal(self, scope: Scope) -> Principal | None:
        headers = dict(scope["headers"])
        header = headers.get(b"authorization")
        if header is None:
            return await self._find_session_principal(scope, headers)
        scheme, _, token = header.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            self._limiter.count_failure(scope)
            raise unauthenticated(f"The header Authorization has the scheme {scheme[:20]!r}. Use Bearer.")
        if is_attempt_token(token.strip()):
            scope[ATTEMPT] = await require_valid(
                scope, self._authenticator.authenticate_attempt(token.strip()), ENDED_ATTEMPT
            )
            return None
        return await require_valid(scope, self._authenticator.authenticate_bearer(token.strip()), INVALID_TOKEN)

    async def _is_still_valid(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether the token or session of a stream is still valid. A database or an issuer that does not answer
        ends no stream."""
        header, secret = headers.get(b"authorization"), read_session_secret(headers)
        try:
            if header is not None:
                token = header.decode("latin-1").partition(" ")[2].strip()
                return await self._authenticator.authenticate_bearer(token) is not None
            return secret is not None and await self._authenticator.authenticate_cookie(secret) is not None
        except ServiceError as error:
            return isinstance(error, IssuerUnreachable | StoreUnavailable)

    async def _find_session_principal(self, scope: Scope, headers: dict[bytes, bytes]) -> Principal | None:
        secret = read_session_secret(headers)
        if secret is None:
            return None
        principal = await self._authenticator.authenticate_cookie(secret)
        if principal is None or (scope["path"] == SESSION_PATH and scope["method"] == "POST"):
            return None  # who logs in shows a token
        scope[CSRF_TOKEN] = expected = make_csrf_token(secret)
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
        limiter.count_failure(scope)
        raise
    if principal is None:
        limiter.count_failure(scope)
        raise unauthenticated(reason)
    return principal


def unauthenticated(reason: str) -> Unauthenticated:
    return Unauthenticated(f"{reason} {HOW_TO_LOG_IN}", headers={"WWW-Authenticate": 'Bearer realm="shoal"'})


def read_principal(request: Request) -> Principal:
    """Return the principal of a request whose route needs one. Raises Unauthenticated."""
    principal: Principal | None = request.scope.get(PRINCIPAL)
    if principal is None:
        raise unauthenticated("This request needs a token.")
    return principal


def _read_code(body: bytes) -> str:
    """Return the code of a problem document."""
    try:
        return str(json.loads(body)["code"])
    except (ValueError, LookupError, TypeError):
        return "refused"


def read_session_secret(headers: dict[bytes, bytes]) -> str | None:
    """Return the secret in the cookie of this server."""
    cookies = headers.get(b"cookie")
    if cookies is None:
        return None
    try:
        cookie = SimpleCookie(cookies.decode("latin-1")).get(_make_cookie_name(headers))
    except CookieError:
        return None
    return cookie.value if cookie is not None and cookie.value else None


def set_session(response: Response, scope: Scope, secret: str, *, max_age_s: float) -> None:
    response.set_cookie(
        _make_cookie_name(dict(scope["headers"])),
        secret,
        max_age=int(max_age_s),
        httponly=True,
        secure=scope["scheme"] == "https",
        samesite="strict",
    )


def clear_session(response: Response, scope: Scope) -> None:
    name = _make_cookie_name(dict(scope["headers"]))
    response.delete_cookie(name, httponly=True, secure=scope["scheme"] == "https", samesite="strict")


def make_csrf_token(secret: str) -> str:
    return hash_secret(f"csrf:{secret}")[:32]


def _make_cookie_name(headers: dict[bytes, bytes]) -> str:
    try:
        port = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").port
    except ValueError:
        port = None
    return _NAME if port is None else f"{_NAME}-{port}"
