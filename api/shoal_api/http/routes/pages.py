"""The HTML pages, their modules and styles, and the JavaScript libraries that arrive as Python packages.

Nothing is loaded from another host, which the Content-Security-Policy enforces. Pages are revalidated by their ETag;
what they load has its version or digest in its address and is kept by the browser for a year (`page_files.py`).
"""

from __future__ import annotations

import gzip
import html
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, HTTPException, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http import page_files
from shoal_api.http.access.authentication import LOGGED_IN, PUBLIC, Needs, require_visible
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
_OWN = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_DASHBOARD = "shoal-job"
"""The uid of the dashboard of a job (tools/grafana/job.py)."""
_GRAFANA = b'<a id="grafana"></a>'
_KEPT = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
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

    for name in page_files.sources():
        if not name.endswith(".html"):
            add(f"/static/{name}", _own(name))
    add("/static/{digest}/{name}", _kept)
    for path, name in PAGES.items():
        add(path, _own(name), LOGGED_IN)
    for path, name in PUBLIC_PAGES.items():
        add(path, _own(name))
    for library in LIBRARIES:
        add(library.url, _library(library))
    add("/favicon.ico", _own("favicon.svg"))
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
    return _answer(request, "job.html", status, _with_grafana(context.grafana_url, job_id))


def _with_grafana(url: str, job_id: str) -> Callable[[bytes], bytes]:
    """Return what makes the hidden link of the page one to the job's dashboard, if there is a Grafana."""
    link = f'<a href="{html.escape(url.rstrip("/"))}/d/{_DASHBOARD}?var-job={quote(job_id)}">Grafana</a>'
    return lambda body: body.replace(_GRAFANA, link.encode() if url else b"")


def _own(name: str):  # type: ignore[no-untyped-def]
    async def own(request: Request) -> Response:
        return _answer(request, name)

    return own


def _answer(
    request: Request, name: str, status: int = 200, complete: Callable[[bytes], bytes] | None = None
) -> Response:
    body, tag = page_files.served(name)
    if complete is not None:
        body = complete(body)
        tag = page_files.make_etag(body)
    headers = {**_OWN, "ETag": tag}
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, status, media_type=_MEDIA_TYPES[Path(name).suffix], headers=headers)


async def _kept(request: Request, digest: str, name: str) -> Response:
    """A file under the address that a page has given it. A page of another release gets the present file."""
    try:
        if name.endswith(".html"):
            raise KeyError(name)
        body, _ = await run_in_threadpool(page_files.served, name)
    except KeyError:
        raise HTTPException(404) from None
    if digest != page_files.digest():
        return _answer(request, name)
    headers = dict(_KEPT)
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers = await run_in_threadpool(page_files.compressed, name), headers | {"Content-Encoding": "gzip"}
    return Response(body, media_type=_MEDIA_TYPES[Path(name).suffix], headers=headers)


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
