"""Routes for the histories of a job (events, logs, incidents, checkpoints), its workers, and the comparison of its
losses with those of another job. `series.py` has the series.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import EventPage, LogPage
from shoal_api.http.access.needs import needs, require_visible
from shoal_api.http.context import MAX_SEQ, Context, JobId, wants_events
from shoal_api.http.followers import EventFollower, LogFollower, LogSelection, plain_line, read_lines
from shoal_api.http.long_poll import EventQuery, poll_events
from shoal_api.http.streams import STREAMED, sse_response, text_response
from shoal_service.core.access import Permission
from shoal_service.core.parity import DEFAULT_TOLERANCE
from shoal_service.store import checkpoint_rows, histories
from shoal_service.views import CheckpointView, IncidentView, Page, ParityView, WorkerView

After = Annotated[int, Query(ge=0, le=MAX_SEQ, description="Only items after this number.")]
LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        pattern=r"^[0-9]{0,18}$",
        description="Number of the last event that the client has received.",
    ),
]
_SSE_OR_TEXT = {"content": STREAMED[200]["content"] | {"text/plain": {"schema": {"type": "string"}}}}


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["histories"])
    store = context.store

    @router.get(
        "/events",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=EventPage,
        summary="A job's events",
        responses=STREAMED,
    )
    async def events(
        request: Request,
        job_id: JobId,
        after: After = 0,
        wait: Annotated[
            float, Query(ge=0, le=60, allow_inf_nan=False, description="Seconds to wait if there is no event yet.")
        ] = 0,
        limit: Annotated[int, Query(ge=1, le=1000, description="Events per answer.")] = 500,
        last_event_id: LastEventId = None,
    ) -> Response:
        """Events are numbered 1, 2, 3 ... without gaps. With `wait`: a long poll, which answers when there is an event
        or the job has ended. With `Accept: text/event-stream`: all events after `Last-Event-ID` (or `after`), as they
        happen, and an event `end` when the job has ended."""
        if wants_events(request):
            await run_in_threadpool(store.get_job, job_id)
            follower = EventFollower(store, job_id, int(last_event_id or after))
            return sse_response(context.changes, job_id, follower, context.pace)
        page = await poll_events(context, request, EventQuery(job_id, after, limit, wait))
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/logs",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=LogPage,
        summary="A job's log",
        responses={200: _SSE_OR_TEXT},
    )
    async def logs(
        request: Request,
        job_id: JobId,
        rank: Annotated[int | None, Query(ge=0, le=10_000_000, description="Only this rank's lines.")] = None,
        after: After = 0,
        tail: Annotated[
            int | None, Query(ge=0, le=10_000, description="Only this number of last lines; 0: only new ones.")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=10_000, description="Lines per answer without `tail`.")] = 1000,
        follow: Annotated[bool, Query(description="Continue with new lines until the job has ended.")] = False,
        last_event_id: LastEventId = None,
    ) -> Response:
        """Returns standard output and standard error of the workers, and one line per event of the job (stream `shoal`,
        no worker). The answer is JSON, or by `Accept` `text/plain` or (with `follow`) `text/event-stream`. `follow`
        alone gives plain text."""
        lines = LogSelection(rank, int(last_event_id or after), None if last_event_id else tail)
        as_text = "text/plain" in request.headers.get("accept", "")
        if follow or wants_events(request):
            await run_in_threadpool(store.get_job, job_id)
            plain = not wants_events(request)
            follower = LogFollower(store, job_id, lines, plain=plain)
            if plain:
                return text_response(context.changes, job_id, follower, context.pace)
            return sse_response(context.changes, job_id, follower, context.pace)
        found, next_after = await run_in_threadpool(read_lines, store, job_id, lines, limit)
        if as_text:
            return Response("".join(map(plain_line, found)), media_type="text/plain")
        page = LogPage(items=tuple(found), next_after=next_after)
        return Response(page.model_dump_json(), media_type="application/json")

    @router.get(
        "/workers",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[WorkerView],
        summary="A job's workers",
    )
    async def workers(job_id: JobId) -> Response:
        """Returns rank, node, pid, generation and state of each worker."""
        return await _page(Page[WorkerView], store.reading(histories.read_workers), job_id)

    @router.get(
        "/incidents",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[IncidentView],
        summary="A job's incidents",
    )
    async def incidents(job_id: JobId) -> Response:
        """Lists failures and what they cost, oldest first."""
        return await _page(Page[IncidentView], store.reading(histories.read_incidents), job_id)

    @router.get(
        "/checkpoints",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[CheckpointView],
        summary="A job's durable checkpoints",
    )
    async def checkpoints(job_id: JobId) -> Response:
        """Lists checkpoints, oldest first; damaged and deleted ones are listed too."""
        return await _page(Page[CheckpointView], store.reading(checkpoint_rows.read_checkpoints), job_id)

    @router.get(
        "/parity",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=ParityView,
        summary="Whether two jobs have the same losses",
    )
    async def parity(
        request: Request,
        job_id: JobId,
        against: Annotated[
            str, Query(min_length=1, max_length=64, description="The other job, usually one without incidents.")
        ],
        tolerance: Annotated[
            float,
            Query(ge=0, le=1, allow_inf_nan=False, description="Largest relative difference that is parity."),
        ] = DEFAULT_TOLERANCE,
        max_points: Annotated[
            int, Query(ge=0, le=20_000, description="List the losses of at most this number of steps; 0: none.")
        ] = 0,
    ) -> Response:
        """Compares the losses of all steps that both jobs have, as exact doubles: the largest difference, the first
        step that differs, and the keys of the specs that may explain it.
        """
        await require_visible(request, against)
        found = await run_in_threadpool(
            store.reading(histories.parity), job_id, against, tolerance=tolerance, max_points=max_points
        )
        return Response(found.model_dump_json(), media_type="application/json")

    return router


async def _page(page: type[Page[Any]], read: Callable[..., Any], job_id: str) -> Response:
    items = await run_in_threadpool(read, job_id)
    return Response(page.model_construct(items=tuple(items)).model_dump_json(), media_type="application/json")
