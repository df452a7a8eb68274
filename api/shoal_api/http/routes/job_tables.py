"""Routes behind the table of jobs: the names that its conditions, orders and columns can use, its saved views, the
table as a file, and the curves of many jobs, which a workspace draws.

A CSV or Parquet file has a row for each job that matches, in the order of the list.

    columns    id, name and state, then those that `columns` names; without any, the fields of the list
    rows       which jobs, and their order, are read once; then the jobs are read in pages, each as it is then

So each job is in the file once, also if it changes its place meanwhile, and a job that is deleted meanwhile is left
out. Memory holds the numbers of the jobs and one page of them. The rows of a Parquet file are read into a spool first.
The address is not below /v1/jobs/, where the id of a job follows.

Curves are one answer or a stream. The answer has each job with the values that `columns` asks for, and its curve. The
stream sends the jobs whose curve has changed, whole, at most once a second. A page asks for the answer first, which is
compressed, and then for the stream `since` that answer.

Also the overview of all jobs, that of one, and the versions of its spec.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

from fastapi import Header, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.answers import FileFormat
from shoal_api.http.conditional import is_unchanged
from shoal_api.http.context import Context
from shoal_api.http.followers import POSITION, Position, follow_document, follow_overview
from shoal_api.http.json_router import (
    MAX_SEQ,
    PROJECT_NAME,
    AppContext,
    Caller,
    Descending,
    JobId,
    JobsFilter,
    JobsOfProjectAlone,
    JsonRouter,
    Order,
    Reading,
    Writing,
    json_response,
    parse_selection,
    wants_events,
)
from shoal_api.http.problems import InvalidRequest, NotAcceptable
from shoal_api.http.request_bodies import body
from shoal_api.http.routes.operations import list_joined, list_seen
from shoal_api.http.streams import STREAMED, Batch, sse_event, sse_response
from shoal_api.http.table_files import (
    FILES,
    file_response,
    iter_csv,
    iter_table,
    require_writer,
)
from shoal_service.control.spec_io import encode
from shoal_service.core.access import Permission
from shoal_service.core.goodput import Period, calendar_edges
from shoal_service.core.where.fields import Field
from shoal_service.fleet_views import (
    Curves,
    FleetNode,
    FleetOverview,
    FleetTimeline,
    JobFields,
    PanelKind,
    ProjectUsage,
    SavedView,
    TableView,
    Workspace,
)
from shoal_service.store import Conflict, JobNotFound, NotFound, ProjectNotFound, Store, histories, job_lists, timeline
from shoal_service.store.job_lists import FleetQuery, JobOrder
from shoal_service.store.many_curves import PLAIN_METRICS, CurveCache, CurveQuery, Versions, is_metric
from shoal_service.views import JobOverview, JobSummary, Page, SpecVersion

Project = Annotated[str, Path(pattern=PROJECT_NAME, description="Name of a project.")]
ViewName = Annotated[
    str,
    Path(
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._ -]{0,61}[A-Za-z0-9])?$",
        description="At most 63 letters, digits, and inner spaces, dashes, dots and underscores.",
    ),
]
_EXAMPLE = {"where": "loss < 2 and not archived", "sort": "loss", "columns": "optimizer.lr,label.team"}

router = JsonRouter("/v1", "jobs")


@router.route("GET /job-fields", Permission.JOBS_READ, "The names that conditions, orders and columns can use")
def job_fields(tx: Reading, caller: Caller) -> JobFields:
    """Lists facts of jobs, the metrics and labels that jobs have, and all settings of a spec by their path. The
    last key of a setting is enough if no other path ends with it."""
    return JobFields(items=job_lists.known_fields(tx, caller.projects))


@router.route("GET /views", Permission.JOBS_READ, "List saved views of the table of jobs")
def list_views(
    tx: Reading,
    caller: Caller,
    project: Annotated[str | None, Query(pattern=PROJECT_NAME, description="Only views of this project.")] = None,
) -> Page[SavedView]:
    """Lists them by project and name."""
    return Page[SavedView](items=tuple(job_lists.read_views(tx, caller.projects, project)))


@router.route(
    "PUT /views/{project}/{view}",
    Permission.JOBS_CHANGE,
    "Save a view of the table of jobs",
    raises=[ProjectNotFound, Conflict],
)
def put_view(
    tx: Writing,
    context: AppContext,
    caller: Caller,
    project: Project,
    view: ViewName,
    document: Annotated[TableView, body(TableView, _EXAMPLE)],
) -> SavedView:
    """Saves it under this name, for all who see the project, and replaces one with the same name."""
    if not caller.sees(project):
        raise ProjectNotFound(project)
    now = context.clock()
    parse_selection(document.where, document.sort, document.columns, archived=False, now=now)
    if document.workspace is not None:
        _check_names(document.workspace, now)
    return job_lists.put_view(tx, project, view, document, by=caller.name, now=now)


@router.route(
    "DELETE /views/{project}/{view}",
    Permission.JOBS_CHANGE,
    "Delete a saved view",
    status=204,
    raises=[ProjectNotFound, NotFound],
)
def delete_view(tx: Writing, caller: Caller, project: Project, view: ViewName) -> None:
    """The jobs stay as they are."""
    if not caller.sees(project):
        raise ProjectNotFound(project)
    job_lists.remove_view(tx, project, view)


def _check_names(workspace: Workspace, now: float) -> None:
    """Raises InvalidRequest if a panel, or the group, is of something that no job can have."""
    if workspace.group:
        parse_selection("", "", workspace.group, archived=False, now=now)
    for panel in workspace.panels:
        if panel.kind is PanelKind.LINES:
            if not is_metric(panel.y):
                raise InvalidRequest(f"y={panel.y!r} of a panel: {NO_METRIC}")
        else:
            for name in filter(None, (panel.x, panel.y)):
                parse_selection("", "", name, archived=False, now=now)


NUM_JOBS = "X-Total-Count"
"""The header with the number of jobs that match."""
_AT_ONCE = 500
_FIRST = ("id", "name", "state")
_USUAL = tuple(name for name in JobSummary.model_fields if name != "values")


@router.route(
    "GET /job-export",
    Permission.JOBS_READ,
    "The table of jobs as a file",
    responses={200: {"description": "The file, with the number of jobs in `X-Total-Count`.", **FILES}},
    raises=[NotAcceptable],
)
def export_jobs(
    context: AppContext,
    query: JobsFilter,
    format: Annotated[FileFormat, Query(description="The format of the file.")] = FileFormat.CSV,
    order: Order = JobOrder.CREATED,
    descending: Descending = True,
    limit: Annotated[int | None, Query(ge=1, le=10_000_000, description="Jobs in the file; default: all.")] = None,
) -> Response:
    """Returns a file with a row for each job, newest first if `sort` and `order` name nothing. A list or a section
    is its JSON. CSV: text that a spreadsheet would run as a formula has an apostrophe before it. Parquet: a column
    of numbers is float if one is, and text if its values have several types; it needs pyarrow on the server."""
    require_writer(format)
    query = replace(query, order=order, descending=descending, limit=limit)
    nums = context.store.reading(job_lists.nums)(query)
    pieces = iter_jobs_file(context.store, format, nums, query.selection.columns)
    return file_response(format, "jobs", pieces, {NUM_JOBS: str(len(nums))})


def iter_jobs_file(store: Store, format: FileFormat, nums: array[int], columns: Sequence[Field]) -> Iterator[bytes]:
    """Yield the bytes of the file with the jobs of these numbers."""
    names = (*_FIRST, *(column.name for column in columns if column.name not in _FIRST)) if columns else _USUAL
    return iter_table(format, names, _pages(store, nums, columns, names))


def _pages(store: Store, nums: array[int], columns: Sequence[Field], names: Sequence[str]) -> Iterator[list[list[Any]]]:
    for begin in range(0, len(nums), _AT_ONCE):
        jobs = store.reading(job_lists.summaries)(nums[begin : begin + _AT_ONCE], columns)
        attributes = _FIRST if columns else _USUAL
        yield [[getattr(job, name) if name in attributes else job.values.get(name) for name in names] for job in jobs]


_MAX_JOBS = 500
_MAX_METRICS = 64
_REFRESH_S = 1.0
_COMPRESSED_BYTES = 4_096
NO_METRIC = f"there is no such curve. Use {', '.join(PLAIN_METRICS)}, metric.NAME or val.NAME."
Reader = Callable[[Versions | None], tuple[Curves, Versions]]


curve_router = JsonRouter("/v1", "overviews")


@curve_router.route("GET /curves", Permission.JOBS_READ, "Curves of many jobs", answer=Curves, responses=STREAMED)
async def curves(
    request: Request,
    context: AppContext,
    query: JobsFilter,
    metric: Annotated[
        list[str],
        Query(
            max_length=_MAX_METRICS,
            description=f"{', '.join(PLAIN_METRICS)}, and metric.NAME and val.NAME for a task's own metrics.",
        ),
    ] = ["loss"],  # noqa: B006
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
    query = replace(query, limit=limit)
    curve_query = CurveQuery(
        metrics=tuple(sorted(set(metric))),
        after_step=after_step,
        until_step=until_step,
        min_points=points,
        packed=packed,
    )

    cache = context.curves

    def read(known: Versions | None) -> tuple[Curves, Versions]:
        with context.store.read() as tx:
            items, versions = cache.read(tx, query, curve_query, known=known)
            total = job_lists.count_fleet(tx, query) if len(versions) >= limit else len(versions)
        return Curves.model_construct(items=items, ids=tuple(versions), total=total, position=""), versions

    if wants_events(request):
        follower = _follow_curves(read, cache.positions.get(since))
        return sse_response(context.changes, None, follower, context.pace, min_gap_s=_REFRESH_S)
    gzipped = "gzip" in request.headers.get("accept-encoding", "")
    body, position = await run_in_threadpool(_make_body, read, cache)
    tag = f'"{position}{"z" if gzipped else ""}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if is_unchanged(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    if gzipped and len(body) > _COMPRESSED_BYTES:
        body, headers = await run_in_threadpool(gzip.compress, body, 1), headers | {"Content-Encoding": "gzip"}
    return Response(body, media_type="application/json", headers=headers)


def _make_body(read: Reader, cache: CurveCache) -> tuple[bytes, str]:
    """Make the body, and its position, which is the same for the same content."""
    curves, versions = read(None)
    body = curves.model_dump_json().encode()
    position = f"{zlib.crc32(body):08x}{len(body):08x}"
    cache.positions.put(position, versions)
    unplaced = b'"position":""}'
    assert body.endswith(unplaced)
    return body[: -len(unplaced)] + f'"position":"{position}"}}'.encode(), position


def _follow_curves(read: Reader, known: Versions | None) -> Iterator[Batch]:
    """Send the jobs that have changed since they were sent."""
    while True:
        curves, versions = read(known)
        is_same = known is not None and list(versions) == list(known) and not curves.items
        known = versions
        yield Batch(() if is_same else (sse_event(curves.model_dump_json(), event="curves"),))


overview_router = JsonRouter("/v1", "overviews")


@overview_router.route(
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
        follower = follow_document("fleet", lambda: read().model_dump_json())
        return sse_response(context.changes, None, follower, context.pace, min_gap_s=_REFRESH_S)
    return json_response(await run_in_threadpool(read))


@overview_router.route("GET /timeline", Permission.JOBS_READ, "Which job had how many workers when, and why")
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


@overview_router.route(
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
    return file_response(FileFormat.CSV, f"usage-by-{by}", iter_csv(names, [rows]))


@overview_router.route(
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
        follower = follow_overview(context.overviews, job_id, position, logs=logs)
        return sse_response(context.changes, job_id, follower, context.pace, min_gap_s=context.pace.refresh_s)
    return json_response(context.store.reading(histories.read_overview)(job_id))


@overview_router.route(
    "GET /jobs/{job_id}/specs", Permission.JOBS_READ, "The versions of a job's spec", raises=[JobNotFound]
)
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
