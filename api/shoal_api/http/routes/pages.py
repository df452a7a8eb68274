"""The HTML pages, their modules and styles, and the JavaScript libraries that arrive as Python packages.

Nothing is loaded from another host, which the Content-Security-Policy enforces. Pages are revalidated by their ETag;
what they load has its version or digest in its address and is kept by the browser for a year (`page_files.py`).
"""

from __future__ import annotations

import gzip
import html
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, HTTPException, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http import page_files
from shoal_api.http.access.needs import LOGGED_IN, PUBLIC, Needs, require_visible
from shoal_api.http.conditional import answer_unless_unchanged, make_etag
from shoal_api.http.json_router import AppContext, JobId
from shoal_api.http.page_files import LIBRARIES, Library
from shoal_service.store import JobNotFound, histories

_STYLES_OF_PLOTLY = (
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='",
    "'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='",
)
"""It adds two style elements, an empty one and one for its map controls. tests/browser fails if it adds another."""
_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' {' '.join(_STYLES_OF_PLOTLY)}; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
_DASHBOARD = "shoal-job"
"""The uid of the dashboard of a job (tools/grafana/job.py)."""
_GRAFANA = b'<a id="grafana"></a>'
_YEAR_HEADERS = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
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


def routes() -> APIRouter:
    """Return the routes of the pages. The files of a release are not known before they are read."""
    router = APIRouter(include_in_schema=False)

    def add(path: str, endpoint: Callable[..., Any], needs: Needs = PUBLIC) -> None:
        router.add_api_route(path, endpoint, name=path, dependencies=[Depends(needs)], response_class=Response)

    for name in page_files.read_sources():
        if not name.endswith(".html"):
            add(f"/static/{name}", _make_page_route(name))
    add("/static/{digest}/{name}", _answer_addressed_file)
    for path, name in PAGES.items():
        add(path, _make_page_route(name), LOGGED_IN)
    for path, name in PUBLIC_PAGES.items():
        add(path, _make_page_route(name))
    for library in LIBRARIES:
        add(library.url, _make_library_route(library))
    add("/favicon.ico", _make_page_route("favicon.svg"))
    add("/jobs/{job_id}", _job_page, LOGGED_IN)
    return router


async def _job_page(request: Request, context: AppContext, job_id: JobId) -> Response:
    """The same page for every job. If there is no such job, the page says so and the status is 404."""
    try:
        await require_visible(request, job_id)
        await run_in_threadpool(context.store.reading(histories.read_job_version), job_id)
        status = 200
    except JobNotFound:
        status = 404
    url = context.grafana_url.rstrip("/")
    link = f'<a href="{html.escape(url)}/d/{_DASHBOARD}?var-job={quote(job_id)}">Grafana</a>' if url else ""
    body = page_files.read_served("job.html")[0].replace(_GRAFANA, link.encode())
    return _answer(request, body, make_etag(body), "text/html", status)


def _make_page_route(name: str):  # type: ignore[no-untyped-def]
    async def answer_page(request: Request) -> Response:
        return _answer_file(request, name)

    return answer_page


def _answer_file(request: Request, name: str) -> Response:
    body, tag = page_files.read_served(name)
    return _answer(request, body, tag, _MEDIA_TYPES[Path(name).suffix])


def _answer(request: Request, body: bytes, tag: str, media_type: str, status: int = 200) -> Response:
    if_none_match = request.headers.get("if-none-match")
    return answer_unless_unchanged(body, tag, if_none_match, status, _PAGE_HEADERS, media_type)


async def _answer_addressed_file(request: Request, digest: str, name: str) -> Response:
    """A file under the address that a page has given it. A page of another release gets the present file."""
    try:
        if name.endswith(".html"):
            raise KeyError(name)
        body, _ = await run_in_threadpool(page_files.read_served, name)
    except KeyError:
        raise HTTPException(404) from None
    if digest != page_files.compute_digest():
        return _answer_file(request, name)
    compress = partial(page_files.compress_served, name)
    return await _answer_for_a_year(request, lambda: body, compress, _MEDIA_TYPES[Path(name).suffix])


def _make_library_route(library: Library):  # type: ignore[no-untyped-def]
    async def serve(request: Request) -> Response:
        return await _answer_for_a_year(request, library.read, partial(_compressed, library), library.media_type)

    return serve


async def _answer_for_a_year(
    request: Request, read: Callable[[], bytes], compress: Callable[[], bytes], media_type: str
) -> Response:
    """Return a file that the browser keeps, compressed if it accepts that. It is read on a worker thread."""
    gzipped = "gzip" in request.headers.get("accept-encoding", "")
    headers = _YEAR_HEADERS | ({"Content-Encoding": "gzip"} if gzipped else {})
    return Response(await run_in_threadpool(compress if gzipped else read), media_type=media_type, headers=headers)


@cache
def _compressed(library: Library) -> bytes:
    return gzip.compress(library.read(), compresslevel=6, mtime=0)
