"""Two pages for people, part of the package: the live page of jobs and the documentation of the API. They load nothing
from other hosts, which the Content-Security-Policy enforces; their scripts write text, never markup.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_FILES = {
    "/": ("index.html", "text/html"),
    "/docs": ("docs.html", "text/html"),
    "/static/draw.js": ("draw.js", "text/javascript"),
    "/static/jobs.js": ("jobs.js", "text/javascript"),
    "/static/docs.js": ("docs.js", "text/javascript"),
    "/static/style.css": ("style.css", "text/css"),
}


def routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        router.add_api_route(path, _page(name, media_type), methods=["GET"], name=name)
    return router


def _page(name: str, media_type: str):  # type: ignore[no-untyped-def]
    body = files("shoal_api.http").joinpath("static", name).read_bytes()

    async def page() -> Response:
        return Response(body, media_type=media_type, headers=_HEADERS)

    return page
