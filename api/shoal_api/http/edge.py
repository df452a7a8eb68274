"""Guard, count and time every HTTP request: the outermost middleware, pure ASGI. Installed by `create_app`.

    unexpected error                    a 500 with an id, and the cause in the log under that id
    change from a page of another       refused: the service has no passwords, and a page in the browser must not
    origin                              cancel jobs on localhost
    foreign name in the header Host     refused: if a name of another origin is made to resolve to this address (DNS
                                        rebinding), the browser takes its page for one of this origin
    response                            gets security headers

It reads no body and buffers nothing.
"""

from __future__ import annotations

import ipaddress
import logging
import time
import uuid
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_api.http.access.request_scope import OPEN_ENDED, SAFE_METHODS, STREAM
from shoal_api.http.problems import CrossOrigin, Internal, UnknownHost, problem_response
from shoal_service.problems import ServiceError
from shoal_service.telemetry.tallies import RequestMetrics

_log = logging.getLogger(__name__)
CLIENT_GONE = 499
"""Status of a request whose client disconnected before the answer, as in the logs of nginx."""
_METHODS = SAFE_METHODS | {"POST", "PUT", "PATCH", "DELETE"}


class Edge:
    def __init__(self, app: ASGIApp, requests: RequestMetrics, allowed_hosts: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._requests = requests
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_mono = time.monotonic()
        status = 0
        is_streaming = False

        async def send_with_headers(message: Message) -> None:
            nonlocal status, is_streaming
            if message["type"] == "http.response.start":
                status = message["status"]
                if scope.get(OPEN_ENDED) == STREAM:
                    is_streaming = True
                    self._requests.streams.add()
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            refusal = self._find_refusal(scope)
            app = self._app if refusal is None else problem_response(refusal, scope["path"])
            await app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = status or CLIENT_GONE  # it left before its body was complete
        except Exception:
            error_id = uuid.uuid4().hex
            request = {"error_id": error_id, "method": scope["method"], "path": scope["path"]}
            _log.exception("http.unexpected_error", extra=request)
            if status:
                raise  # too late for an answer: a closed connection shows the client that it is incomplete
            failure = Internal(f"The service has failed. Its log holds the cause under {error_id}.")
            await problem_response(failure, scope["path"], error_id)(scope, receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            if is_streaming:
                self._requests.streams.add(amount=-1)
            seconds = None if OPEN_ENDED in scope else time.monotonic() - started_mono
            self._requests.observe(method, route, status, seconds)

    def _find_refusal(self, scope: Scope) -> ServiceError | None:
        if not is_accepted_host(dict(scope["headers"]).get(b"host", b""), self._allowed_hosts):
            return UnknownHost(
                "The header Host does not name this server. If it is this server's name, add it to SHOAL_ALLOWED_HOSTS."
            )
        if _is_cross_origin_change(scope):
            return CrossOrigin("Origin and Host differ: a web page of another origin may not change anything here.")
        return None


@lru_cache(maxsize=1024)
def is_accepted_host(header: bytes, allowed: frozenset[str]) -> bool:
    """Return True if a Host header is an address, localhost or one of the `allowed` names; "*" allows every name.

    An address is accepted because only names can be rebound; a missing header, because every browser sends it.
    `allowed` is in lower case.
    """
    if not header or "*" in allowed:
        return True
    try:
        name = urlsplit(f"//{header.decode('latin-1')}").hostname or ""
    except ValueError:
        return False
    if name in ("localhost", *allowed):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_cross_origin_change(scope: Scope) -> bool:
    if scope["method"] in SAFE_METHODS:
        return False
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    if origin is None:
        return False
    try:
        return bool(urlsplit(origin).netloc.lower() != headers.get(b"host", b"").lower())
    except ValueError:
        return True
