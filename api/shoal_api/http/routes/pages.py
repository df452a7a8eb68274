"""The HTML pages, their modules and styles, and the JavaScript libraries that arrive as Python packages.

Nothing is loaded from another host, which the Content-Security-Policy enforces. Own files are revalidated by their
ETag; a library has its version in its path and is kept by the browser for a year (decision 0031).
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import LOGGED_IN, PUBLIC, require_visible
from shoal_api.http.context import Context, JobId
from shoal_service.store import histories
from shoal_service.store.errors import JobNotFound

_STYLES_OF_PLOTLY = (
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='",
    "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='",
)
"""It adds two style elements, an empty one and one for its map controls. tests/browser fails if it adds another."""
_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' {' '.join(_STYLES_OF_PLOTLY)}; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_OWN = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_KEPT = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
PAGES = {
    "/": "fleet.html",
    "/workspace": "workspace.html",
    "/compare": "compare.html",
    "/sweeps": "sweeps.html",
    "/models": "models.html",
    "/fleet": "machines.html",
    "/account": "account.html",
    "/docs": "docs.html",
}
PUBLIC_PAGES = {"/login": "login.html", "/runbook": "runbook.html"}
"""An alert links to a section of the runbook, which says nothing about this service: no login comes between."""


@dataclass(frozen=True, slots=True)
class Library:
    """A file of an installed Python package."""

    package: str
    distribution: str
    path: str
    media_type: str

    @property
    def url(self) -> str:
        return f"/static/vendor/{version(self.distribution)}/{Path(self.path).name}"

    def read(self) -> bytes:
        """Reads the file without importing the package."""
        spec = find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations, f"{self.distribution} is a dependency of Shoal"
        return Path(spec.submodule_search_locations[0], self.path).read_bytes()


LIBRARIES = (
    Library("plotly", "plotly", "package_data/plotly.min.js", "text/javascript"),
    Library("fastapi_offline", "fastapi-offline", "static/swagger-ui-bundle.js", "text/javascript"),
    Library("fastapi_offline", "fastapi-offline", "static/swagger-ui.css", "text/css"),
)


def routes(context: Context) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for part in files("shoal_api.http").joinpath("static").iterdir():
        if not part.name.endswith(".html"):
            router.add_api_route(
                f"/static/{part.name}", _own(part.name), methods=["GET"], name=part.name, dependencies=[PUBLIC]
            )
    for path, name in PAGES.items():
        router.add_api_route(path, _own(name), methods=["GET"], name=name, dependencies=[LOGGED_IN])
    for path, name in PUBLIC_PAGES.items():
        router.add_api_route(path, _own(name), methods=["GET"], name=name, dependencies=[PUBLIC])
    for library in LIBRARIES:
        router.add_api_route(library.url, _library(library), methods=["GET"], name=library.url, dependencies=[PUBLIC])

    @router.get("/jobs/{job_id}", dependencies=[LOGGED_IN])
    async def job_page(request: Request, job_id: JobId) -> Response:
        """The same page for every job. If there is no such job, the page says so and the status is 404."""
        try:
            await require_visible(request, job_id)
            await run_in_threadpool(context.store.reading(histories.job_version), job_id)
            status = 200
        except JobNotFound:
            status = 404
        return _answer(request, "job.html", status)

    return router


def _own(name: str):  # type: ignore[no-untyped-def]
    async def own(request: Request) -> Response:
        return _answer(request, name)

    return own


def _answer(request: Request, name: str, status: int = 200) -> Response:
    body, tag = _file(name)
    headers = {**_OWN, "ETag": tag}
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, status, media_type=_MEDIA_TYPES[Path(name).suffix], headers=headers)


@cache
def _file(name: str) -> tuple[bytes, str]:
    """Return the bytes, in which a library's name stands for its address, and their ETag."""
    body = files("shoal_api.http").joinpath("static", name).read_bytes()
    if name.endswith(".html"):
        for library in LIBRARIES:
            body = body.replace(f"/static/vendor/{Path(library.path).name}".encode(), library.url.encode())
    return body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'


def _library(library: Library):  # type: ignore[no-untyped-def]
    async def serve(request: Request) -> Response:
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(await run_in_threadpool(library.read), media_type=library.media_type, headers=_KEPT)
        body = await run_in_threadpool(_compressed, library)
        return Response(body, media_type=library.media_type, headers={**_KEPT, "Content-Encoding": "gzip"})

    return serve


@cache
def _compressed(library: Library) -> bytes:
    return gzip.compress(library.read(), compresslevel=6, mtime=0)
