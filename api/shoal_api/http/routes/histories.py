"""Routes for the histories of a job (events, logs, incidents, checkpoints), its workers, and the comparison of its
losses with those of another job. `series.py` has the series.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import EventPage, LogPage
from shoal_api.http.access.needs import require_visible
from shoal_api.http.context import wants_events
from shoal_api.http.followers import EventFollower, LogFollower, LogSelection, plain_line, read_events, read_lines
from shoal_api.http.json_router import AppContext, JsonRouter, Reading, json_response
from shoal_api.http.long_poll import poll
from shoal_api.http.parameters import MAX_SEQ, JobId, LastEventId
from shoal_api.http.streams import STREAMED, sse_response, text_response
from shoal_service.core.access import Permission
from shoal_service.core.parity import DEFAULT_TOLERANCE
from shoal_service.store import JobNotFound, checkpoint_rows, histories
from shoal_service.views import CheckpointView, IncidentView, Page, ParityView, WorkerView

After = Annotated[int, Query(ge=0, le=MAX_SEQ, description="Only items after this number.")]
_SSE_OR_TEXT = {"content": STREAMED[200]["content"] | {"text/plain": {"schema": {"type": "string"}}}}

router = JsonRouter("/v1/jobs/{job_id}", "histories", raises=[JobNotFound])


@router.route("GET /events", Permission.JOBS_READ, "A job's events", answer=EventPage, responses=STREAMED)
async def events(
    request: Request,
    context: AppContext,
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
        await run_in_threadpool(context.store.get_job, job_id)
        follower = EventFollower(context.store, job_id, int(last_event_id or after))
        return sse_response(context.changes, job_id, follower, context.pace)
    read = partial(read_events, context.store, job_id, after, limit)
    with context.changes.watching(job_id) as watch:
        page = await poll(
            context.changes, watch, request, read, is_answer=lambda page: page.items or page.ended, wait_s=wait
        )
    return json_response(page)


@router.route("GET /logs", Permission.JOBS_READ, "A job's log", answer=LogPage, responses={200: _SSE_OR_TEXT})
def logs(
    request: Request,
    context: AppContext,
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
    if follow or wants_events(request):
        context.store.get_job(job_id)
        plain = not wants_events(request)
        respond = text_response if plain else sse_response
        return respond(context.changes, job_id, LogFollower(context.store, job_id, lines, plain), context.pace)
    items, next_after = read_lines(context.store, job_id, lines, limit)
    if "text/plain" in request.headers.get("accept", ""):
        return Response("".join(map(plain_line, items)), media_type="text/plain")
    return json_response(LogPage(items=tuple(items), next_after=next_after))


@router.route("GET /workers", Permission.JOBS_READ, "A job's workers")
def workers(tx: Reading, job_id: JobId) -> Page[WorkerView]:
    """Returns rank, node, pid, generation and state of each worker."""
    return Page[WorkerView].model_construct(items=tuple(histories.read_workers(tx, job_id)))


@router.route("GET /incidents", Permission.JOBS_READ, "A job's incidents")
def incidents(tx: Reading, job_id: JobId) -> Page[IncidentView]:
    """Lists failures and what they cost, oldest first."""
    return Page[IncidentView].model_construct(items=tuple(histories.read_incidents(tx, job_id)))


@router.route("GET /checkpoints", Permission.JOBS_READ, "A job's durable checkpoints")
def checkpoints(tx: Reading, job_id: JobId) -> Page[CheckpointView]:
    """Lists checkpoints, oldest first; damaged and deleted ones are listed too."""
    return Page[CheckpointView].model_construct(items=tuple(checkpoint_rows.read_checkpoints(tx, job_id)))


@router.route("GET /parity", Permission.JOBS_READ, "Whether two jobs have the same losses")
async def parity(
    request: Request,
    context: AppContext,
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
) -> ParityView:
    """Compares the losses of all steps that both jobs have, as exact doubles: the largest difference, the first
    step that differs, and the keys of the specs that may explain it.
    """
    await require_visible(request, against)
    read = context.store.reading(histories.parity)
    return await run_in_threadpool(read, job_id, against, tolerance=tolerance, max_points=max_points)
