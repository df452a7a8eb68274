"""Routes behind the pages: the overview of all jobs, the overview of one, and the versions of its spec."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

from fastapi import Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.context import Context, wants_events
from shoal_api.http.followers import POSITION, DocumentFollower, OverviewFollower, Position
from shoal_api.http.json_router import (
    AppContext,
    Caller,
    Descending,
    JobId,
    JobsFilter,
    JobsOfProjectAlone,
    JsonRouter,
    Order,
    Reading,
    json_response,
)
from shoal_api.http.routes.operations import list_joined, list_seen
from shoal_api.http.streams import STREAMED, sse_response
from shoal_api.http.table_files import FILES, FileFormat, csv_pieces, file_response
from shoal_service.control.spec_io import encode
from shoal_service.core.access import Permission
from shoal_service.core.goodput import Period, calendar_edges
from shoal_service.fleet_views import FleetNode, FleetOverview, FleetTimeline, ProjectUsage
from shoal_service.store import JobNotFound, histories, job_lists, timeline
from shoal_service.store.job_lists import FleetQuery, JobOrder
from shoal_service.views import JobOverview, Page, SpecVersion

_REFRESH_S = 1.0

router = JsonRouter("/v1", "overviews")


@router.route(
    "GET /overview", Permission.JOBS_READ, "Everything about all jobs", answer=FleetOverview, responses=STREAMED
)
async def fleet_overview(
    request: Request,
    context: AppContext,
    query: JobsFilter,
    order: Order = JobOrder.CREATED,
    descending: Descending = True,
    offset: Annotated[int, Query(ge=0, le=10_000_000, description="Jobs to leave out.")] = 0,
    limit: Annotated[int, Query(ge=1, le=200, description="Jobs in the answer.")] = 50,
    jobs_only: Annotated[
        bool,
        Query(
            description="Only `items`, without small curves, for a search: `total` is their number, and nothing is "
            "counted or summed over other jobs."
        ),
    ] = False,
) -> Response:
    """Returns a page of jobs with their progress and small curves, jobs by state, goodput of the cluster, and what
    runs on each node. With `Accept: text/event-stream`: now and after every change, as events `fleet`."""
    query = replace(query, order=order, descending=descending, offset=offset, limit=limit)
    read = partial(_read_jobs_only if jobs_only else _read_fleet, context, query)
    if wants_events(request):
        follower = DocumentFollower("fleet", lambda: read().model_dump_json())
        return sse_response(context.changes, None, follower, context.pace, min_gap_s=_REFRESH_S)
    return json_response(await run_in_threadpool(read))


@router.route("GET /timeline", Permission.JOBS_READ, "Which job had how many workers when, and why")
def fleet_timeline(
    tx: Reading,
    context: AppContext,
    caller: Caller,
    hours: Annotated[float, Query(gt=0, le=720, description="Length of the window, which ends now.")] = 24.0,
) -> FleetTimeline:
    """Returns the workers of the newest jobs over time, the decisions of the scheduler with their reasons, and the
    worker-seconds by project and category."""
    until = context.clock()
    return timeline.read(tx, since=until - hours * 3600, until=until, visible=caller.projects)


@router.route(
    "GET /usage",
    Permission.JOBS_READ,
    "What projects have used by week or month",
    answer=Page[ProjectUsage],
    responses={200: {"description": "JSON, or the same as a CSV file.", **FILES}},
)
def usage(
    tx: Reading,
    context: AppContext,
    caller: Caller,
    by: Annotated[Period, Query(description="Weeks begin on Monday, in UTC.")] = Period.WEEK,
    periods: Annotated[int, Query(ge=1, le=2400, description="Number of periods, the current one included.")] = 8,
    project: JobsOfProjectAlone = None,
    csv: Annotated[bool, Query(description="A CSV file, in hours.")] = False,
) -> Response:
    """Sums worker-seconds by project and period, oldest first. Time in the queue is not counted, nor are workers that
    a job has requested and did not have. Jobs that were deleted are not counted."""
    edges = calendar_edges(context.clock(), by, periods)
    items = timeline.usage(tx, edges, visible=caller.projects, project=project)
    if not csv:
        return json_response(Page[ProjectUsage](items=items))
    names = ("project", by.value, "worker_hours", "productive_hours", "jobs")
    rows = [
        (
            use.project,
            datetime.fromtimestamp(use.since, UTC).date().isoformat(),
            round(use.worker_s / 3600, 3),
            round(use.productive_s / 3600, 3),
            use.num_jobs,
        )
        for use in items
    ]
    return file_response(FileFormat.CSV, f"usage-by-{by}", csv_pieces(names, [rows]))


@router.route(
    "GET /jobs/{job_id}/overview",
    Permission.JOBS_READ,
    "Everything about a job",
    answer=JobOverview,
    responses=STREAMED,
    raises=[JobNotFound],
)
def job_overview(
    request: Request,
    context: AppContext,
    job_id: JobId,
    logs: Annotated[bool, Query(description="The stream also has the lines of the job's log.")] = False,
    last_event_id: Annotated[
        str | None,
        Header(alias="Last-Event-ID", pattern=POSITION, description="The last id that the client has received."),
    ] = None,
) -> Response:
    """Returns job, series, accounts over time, incidents, workers, events and checkpoints. The series has at most
    500 points. With `Accept: text/event-stream`: the parts as events of their names, first all of them, then those
    that change; after `Last-Event-ID` only what is new."""
    if wants_events(request):
        context.store.get_job(job_id)
        position = Position.parse(last_event_id) if last_event_id else Position()
        follower = OverviewFollower(context.overviews, job_id, position, logs)
        return sse_response(context.changes, job_id, follower, context.pace, min_gap_s=context.pace.refresh_s)
    return json_response(context.store.reading(histories.read_overview)(job_id))


@router.route("GET /jobs/{job_id}/specs", Permission.JOBS_READ, "The versions of a job's spec", raises=[JobNotFound])
def spec_versions(tx: Reading, job_id: JobId) -> Page[SpecVersion]:
    """Lists the versions, oldest first, with the time of acceptance."""
    versions = histories.read_spec_versions(tx, job_id)
    return Page(items=tuple(version.model_copy(update={"yaml": encode(version.spec)}) for version in versions))


def _read_jobs_only(context: Context, query: FleetQuery) -> FleetOverview:
    job_page = context.store.reading(job_lists.plain_fleet_page)(query)
    return FleetOverview.model_construct(
        items=tuple(job_page.values()),
        total=len(job_page),
        num_by_state={},
        goodput=(),
        goodput_now=None,
        nodes=(),
        clusters=(),
        connected=context.cluster.snapshot().connected,
        exposure=context.exposure,
    )


def _read_fleet(context: Context, query: FleetQuery) -> FleetOverview:
    with context.store.read() as tx:
        items, total = job_lists.fleet(tx, query)
        num_by_state, goodput, goodput_now = job_lists.fleet_accounts(tx, query.visible)
        on_node = job_lists.jobs_by_node(tx, query.visible)
        seen, clusters = list_seen(tx, context), list_joined(tx, context)
    nodes = tuple(FleetNode.model_construct(**dict(node), jobs=on_node.get(node.node_id, ())) for node in seen)
    return FleetOverview.model_construct(
        items=items,
        total=total,
        num_by_state=num_by_state,
        goodput=goodput,
        goodput_now=goodput_now,
        nodes=nodes,
        clusters=clusters,
        connected=context.cluster.snapshot().connected,
        exposure=context.exposure,
    )
