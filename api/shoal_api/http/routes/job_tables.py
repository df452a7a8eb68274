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
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.conditional import is_unchanged
from shoal_api.http.context import wants_events
from shoal_api.http.json_router import (
    MAX_SEQ,
    PROJECT_NAME,
    AppContext,
    Caller,
    Descending,
    JobsFilter,
    JsonRouter,
    Order,
    Reading,
    Writing,
    body,
    selection_of,
)
from shoal_api.http.problems import InvalidRequest, NotAcceptable
from shoal_api.http.streams import STREAMED, Batch, ThreadFollower, sse_event, sse_response
from shoal_api.http.table_files import (
    FILES,
    FileFormat,
    Spool,
    csv_pieces,
    file_response,
    parquet_pieces,
    require_writer,
)
from shoal_service.core.access import Permission
from shoal_service.core.where.fields import Field
from shoal_service.fleet_views import Curves, JobFields, PanelKind, SavedView, TableView, Workspace
from shoal_service.store import Conflict, NotFound, ProjectNotFound, Store, job_lists
from shoal_service.store.job_lists import JobOrder
from shoal_service.store.many_curves import PLAIN_METRICS, CurveCache, CurveQuery, Versions, is_metric
from shoal_service.views import JobSummary, Page

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
    selection_of(document.where, document.sort, document.columns, archived=False, now=now)
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
        selection_of("", "", workspace.group, archived=False, now=now)
    for panel in workspace.panels:
        if panel.kind is PanelKind.LINES:
            if not is_metric(panel.y):
                raise InvalidRequest(f"y={panel.y!r} of a panel: {NO_METRIC}")
        else:
            for name in filter(None, (panel.x, panel.y)):
                selection_of("", "", name, archived=False, now=now)


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
    made = pieces(context.store, format, nums, query.selection.columns)
    return file_response(format, "jobs", made, {NUM_JOBS: str(len(nums))})


def pieces(store: Store, format: FileFormat, nums: array[int], columns: Sequence[Field]) -> Iterator[bytes]:
    """Yield the bytes of the file with the jobs of these numbers."""
    names = (*_FIRST, *(column.name for column in columns if column.name not in _FIRST)) if columns else _USUAL
    pages = _pages(store, nums, columns, names)
    if format is FileFormat.CSV:
        yield from csv_pieces(names, pages)
        return
    with Spool(len(names)) as spool:
        for page in pages:
            spool.add(page)
        yield from parquet_pieces(names, spool.types, spool.pages())


def _pages(store: Store, nums: array[int], columns: Sequence[Field], names: Sequence[str]) -> Iterator[list[list[Any]]]:
    for begin in range(0, len(nums), _AT_ONCE):
        jobs = store.reading(job_lists.summaries)(nums[begin : begin + _AT_ONCE], columns)
        own = _FIRST if columns else _USUAL
        yield [[getattr(job, name) if name in own else job.values.get(name) for name in names] for job in jobs]


_MAX_JOBS = 500
_MAX_METRICS = 64
_REFRESH_S = 1.0
_COMPRESSED_BYTES = 4_096
NO_METRIC = f"no curve has this name. Known are {', '.join(PLAIN_METRICS)}, metric.NAME and val.NAME."
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

    curves = context.curves

    def read(known: Versions | None) -> tuple[Curves, Versions]:
        with context.store.read() as tx:
            items, versions = curves.read(tx, query, curve_query, known=known)
            total = job_lists.count_fleet(tx, query) if len(versions) >= limit else len(versions)
        return Curves.model_construct(items=items, ids=tuple(versions), total=total, position=""), versions

    if wants_events(request):
        follower = _CurveFollower(read, curves.find_versions(since))
        return sse_response(context.changes, None, follower, context.pace, min_gap_s=_REFRESH_S)
    gzipped = "gzip" in request.headers.get("accept-encoding", "")
    body, position = await run_in_threadpool(_make_body, read, curves)
    tag = f'"{position}{"z" if gzipped else ""}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if is_unchanged(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    if gzipped and len(body) > _COMPRESSED_BYTES:
        body, headers = await run_in_threadpool(gzip.compress, body, 1), headers | {"Content-Encoding": "gzip"}
    return Response(body, media_type="application/json", headers=headers)


def _make_body(read: Reader, curves: CurveCache) -> tuple[bytes, str]:
    """Make the body, and its position, which is the same for the same content."""
    drawn, versions = read(None)
    body = drawn.model_dump_json().encode()
    position = f"{zlib.crc32(body):08x}{len(body):08x}"
    curves.keep_versions(position, versions)
    unplaced = b'"position":""}'
    assert body.endswith(unplaced)
    return body[: -len(unplaced)] + f'"position":"{position}"}}'.encode(), position


class _CurveFollower(ThreadFollower):
    """Sends the jobs that have changed since it has sent them."""

    def __init__(self, read: Reader, known: Versions | None) -> None:
        self._read = read
        self._known = known

    def read_now(self) -> Batch:
        drawn, versions = self._read(self._known)
        is_same = self._known is not None and list(versions) == list(self._known)
        self._known = versions
        if is_same and not drawn.items:
            return Batch(())
        return Batch((sse_event(drawn.model_dump_json(), event="curves"),))
