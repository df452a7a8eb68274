"""Curves of many jobs in one answer or stream: what a workspace draws.

The answer has each job with the values that `columns` asks for, and its curve. The stream sends the jobs whose curve
has changed, whole, at most once a second. A page asks for the answer first, which is compressed, and then for the
stream `since` that answer.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import Annotated

from fastapi import Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.conditional import is_unchanged
from shoal_api.http.context import wants_events
from shoal_api.http.json_router import AppContext, Caller, JsonRouter
from shoal_api.http.parameters import (
    MAX_SEQ,
    Archived,
    Columns,
    JobsOfProject,
    Search,
    Sort,
    Where,
    selection_of,
)
from shoal_api.http.problems import InvalidRequest
from shoal_api.http.streams import STREAMED, Batch, sse_event, sse_response
from shoal_service.core.access import Permission
from shoal_service.fleet_views import Curves
from shoal_service.store import job_lists
from shoal_service.store.job_lists import FleetQuery
from shoal_service.store.many_curves import PLAIN_METRICS, ManyCurves, Versions, Wanted, is_metric

_MAX_JOBS = 500
_MAX_METRICS = 64
_REFRESH_S = 1.0
_COMPRESSED_BYTES = 4_096
NO_METRIC = f"no curve has this name. Known are {', '.join(PLAIN_METRICS)}, metric.NAME and val.NAME."
Reader = Callable[[Versions | None], tuple[Curves, Versions]]


router = JsonRouter("/v1", "overviews")


@router.route("GET /curves", Permission.JOBS_READ, "Curves of many jobs", answer=Curves, responses=STREAMED)
async def curves(
    request: Request,
    context: AppContext,
    caller: Caller,
    metric: Annotated[
        list[str],
        Query(
            max_length=_MAX_METRICS,
            description=f"{', '.join(PLAIN_METRICS)}, and metric.NAME and val.NAME for a task's own metrics.",
        ),
    ] = ["loss"],  # noqa: B006
    job: Annotated[list[str], Query(max_length=_MAX_JOBS, description="Only the jobs with these ids.")] = [],  # noqa: B006
    search: Search = "",
    project: JobsOfProject = None,
    where: Where = "",
    sort: Sort = "",
    columns: Columns = "",
    archived: Archived = False,
    limit: Annotated[int, Query(ge=1, le=_MAX_JOBS, description="Jobs in the answer.")] = 200,
    points: Annotated[
        int,
        Query(
            ge=1,
            le=2000,
            description="Points of each curve at least, if it has as many steps. At most eight times as many are "
            "answered, and some for its end: each is the mean of 1, 8, 64, 512 ... steps.",
        ),
    ] = 60,
    after_step: Annotated[int, Query(ge=-1, le=MAX_SEQ, description="Only later steps.")] = -1,
    until_step: Annotated[int, Query(ge=0, le=MAX_SEQ, description="Only steps up to this one.")] = MAX_SEQ,
    packed: Annotated[bool, Query(description="Columns are base64 of little-endian numbers.")] = False,
    since: Annotated[
        str,
        Query(pattern=r"^[0-9a-f]{0,16}$", description="For the stream: `position` of the answer that the client has."),
    ] = "",
) -> Response:
    """Returns jobs, the newest first if `sort` names no order, with their curves. With `Accept: text/event-stream`:
    the jobs that have changed, as events `curves`."""
    for name in metric:
        if not is_metric(name):
            raise InvalidRequest(f"metric={name!r}: {NO_METRIC}")
    query = FleetQuery(
        search=search,
        project=project,
        visible=caller.projects,
        ids=frozenset(job),
        selection=selection_of(where, sort, columns, archived=archived or bool(job), now=context.clock()),
        limit=limit,
    )
    wanted = Wanted(
        metrics=tuple(sorted(set(metric))),
        after_step=after_step,
        until_step=until_step,
        least=points,
        packed=packed,
    )

    many = context.curves

    def read(known: Versions | None) -> tuple[Curves, Versions]:
        with context.store.read() as tx:
            items, versions = many.read(tx, query, wanted, known=known)
            total = job_lists.count_fleet(tx, query) if len(versions) >= limit else len(versions)
        return Curves.model_construct(items=items, ids=tuple(versions), total=total, position=""), versions

    if wants_events(request):
        follower = _CurveFollower(read, many.versions_at(since))
        return sse_response(context.changes, None, follower, context.pace, min_gap_s=_REFRESH_S)
    gzipped = "gzip" in request.headers.get("accept-encoding", "")
    body, position = await run_in_threadpool(_body, read, many)
    tag = f'"{position}{"z" if gzipped else ""}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if is_unchanged(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    if gzipped and len(body) > _COMPRESSED_BYTES:
        body, headers = await run_in_threadpool(gzip.compress, body, 1), headers | {"Content-Encoding": "gzip"}
    return Response(body, media_type="application/json", headers=headers)


def _body(read: Reader, many: ManyCurves) -> tuple[bytes, str]:
    """Make the body, and its position, which is the same for the same content."""
    drawn, versions = read(None)
    body = drawn.model_dump_json().encode()
    position = f"{zlib.crc32(body):08x}{len(body):08x}"
    many.remember(position, versions)
    unplaced = b'"position":""}'
    assert body.endswith(unplaced)
    return body[: -len(unplaced)] + f'"position":"{position}"}}'.encode(), position


class _CurveFollower:
    """Sends the jobs that have changed since it has sent them."""

    def __init__(self, read: Reader, known: Versions | None) -> None:
        self._read = read
        self._known = known

    def read(self) -> Batch:
        drawn, versions = self._read(self._known)
        is_same = self._known is not None and list(versions) == list(self._known)
        self._known = versions
        if is_same and not drawn.items:
            return Batch(())
        return Batch((sse_event(drawn.model_dump_json(), event="curves"),))
