"""The session's cookie, and the token against forged requests that belongs to it.

The cookie is HttpOnly and SameSite=Strict, and Secure under TLS. Browsers send cookies to every port of a host, so its
name has the port: two servers on one machine do not log each other's users out. The CSRF token is made from the
cookie's secret, so that nothing more is stored: only a page of this origin can read it.
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import Scope

from shoal_service.core.access import hash_of

_NAME = "shoal-session"


def session_of(headers: dict[bytes, bytes]) -> str | None:
    """The secret in the cookie of this server."""
    cookies = headers.get(b"cookie")
    if cookies is None:
        return None
    try:
        found = SimpleCookie(cookies.decode("latin-1")).get(_name(headers))
    except CookieError:
        return None
    return found.value if found is not None and found.value else None


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
