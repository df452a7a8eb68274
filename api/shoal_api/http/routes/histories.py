"""Routes for the histories of a job (events, logs, incidents, checkpoints, series, system metrics), for its workers,
and for what looks into them: stacks and profiles. One compares its losses with those of another job.

The series is JSON for programs that look, and CSV or Parquet for those that keep it. Files are written in pieces on
worker threads, so that a long job does not fill the memory. A request for stacks or for a profile is stored; the
control loop passes it to the supervisor, which carries it out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from fastapi import Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from shoal_api.answers import EventPage, FileFormat, LogPage
from shoal_api.http.access.needs import require_visible
from shoal_api.http.followers import LogSelection, follow_events, follow_log, plain_line, read_events, read_lines
from shoal_api.http.json_router import (
    MAX_SEQ,
    AppContext,
    Job,
    JobId,
    JsonRouter,
    LastEventId,
    Reading,
    Writing,
    json_response,
    wants_events,
)
from shoal_api.http.problems import InvalidRequest, NotAcceptable, NotReady
from shoal_api.http.request_bodies import body
from shoal_api.http.streams import STREAMED, poll, sse_response, text_response
from shoal_api.http.table_files import (
    FILES,
    ColumnType,
    file_response,
    iter_table,
    require_writer,
)
from shoal_service.cluster.errors import SupervisorUnavailable
from shoal_service.core.access import Permission
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.parity import DEFAULT_TOLERANCE
from shoal_service.core.system_metrics import SystemMetric
from shoal_service.fleet_views import IslandRound
from shoal_service.problems import ServiceError
from shoal_service.store import (
    JobEnded,
    JobNotFound,
    ProfileNotFound,
    ProfileOpen,
    RequestConflict,
    Store,
    checkpoint_rows,
    curves,
    histories,
    island_rounds,
    supervisor_links,
    system_samples,
)
from shoal_service.store.records import load_view
from shoal_service.views import (
    CheckpointView,
    IncidentView,
    Page,
    ParityView,
    ProfileBody,
    ProfileView,
    SystemColumns,
    WorkerView,
)
from shoal_workers.contract import TRACE_FILE, Stacks

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
        follower = follow_events(context.store, job_id, int(last_event_id or after))
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
        follower = follow_log(context.store, job_id, lines, plain=plain)
        return respond(context.changes, job_id, follower, context.pace)
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


@router.route("GET /rounds", Permission.JOBS_READ, "The rounds in which a job merges with other islands")
def rounds(tx: Reading, job_id: JobId) -> Page[IslandRound]:
    """Lists the newest rounds of all islands that train one model with the job, the newest first; without islands
    there are none."""
    islands = load_view(tx, job_id).spec.islands
    items = () if islands is None or islands.run is None else island_rounds.rounds(tx, islands.run)
    return Page[IslandRound].model_construct(items=items)


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
    read = context.store.reading(histories.compare_losses)
    return await run_in_threadpool(read, job_id, against, tolerance=tolerance, max_points=max_points)


_MAX_POINTS = 1000
_ROWS_AT_ONCE = 5000


class SeriesFormat(StrEnum):
    """How a series is answered."""

    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


_NESTED = ("metrics", "val_metrics")
_PLAIN = tuple(name for name in SeriesPoint.model_fields if name not in _NESTED)
_INTEGERS = ("step", "world_size", "generation")
Pages = Iterable[Sequence[SeriesPoint]]


@router.route(
    "GET /series",
    Permission.JOBS_READ,
    "Loss, speed, world size and the task's own metrics over the steps",
    answer=Page[SeriesPoint],
    responses={200: FILES},
    raises=[NotAcceptable],
)
def series(
    context: AppContext,
    job_id: JobId,
    max_points: Annotated[
        int | None,
        Query(
            ge=1,
            le=20_000,
            description="Longer series are down-sampled. Default: 1000 for json; csv and parquet have all stored ones.",
        ),
    ] = None,
    after_step: Annotated[int, Query(ge=-1, le=MAX_SEQ, description="Only later steps.")] = -1,
    until_step: Annotated[int | None, Query(ge=0, le=MAX_SEQ, description="Only steps up to this one.")] = None,
    format: Annotated[SeriesFormat, Query(description="The form of the answer.")] = SeriesFormat.JSON,
) -> Response:
    """Returns one point per completed step, or the mean of several. Values that are not finite are null.

    `csv` and `parquet`: a column for each field, and `metrics.NAME` and `val_metrics.NAME` for the task's own
    metrics. Parquet needs pyarrow on the server.
    """
    if format is not SeriesFormat.JSON:
        require_writer(FileFormat(format))
    store = context.store
    points = store.reading(curves.read_curve)(
        job_id, after_step=after_step, until_step=until_step, max_points=max_points or _MAX_POINTS
    )
    if format is SeriesFormat.JSON:
        return json_response(Page[SeriesPoint].model_construct(items=tuple(points)))
    # columns come first in a file, so the means of all steps are read before the steps
    pages = [points] if max_points or not points else _pages(store, job_id, after_step, points[-1].step)
    file = FileFormat(format)
    return file_response(file, f"{job_id}-series", iter_series_file(file, find_columns(points), pages))


def _pages(store: Store, job_id: str, after_step: int, until_step: int) -> Iterator[Sequence[SeriesPoint]]:
    """Yield every step, in parts. The names of metrics are known from the means, which have each name of their
    steps."""
    while page := store.reading(histories.read_series)(
        job_id, after_step=after_step, until_step=until_step, limit=_ROWS_AT_ONCE
    ):
        yield page
        after_step = page[-1].step


def find_columns(points: Iterable[SeriesPoint]) -> tuple[str, ...]:
    """Return the columns of a file with these points."""
    columns_by_table: dict[str, set[str]] = {nested: set() for nested in _NESTED}
    for point in points:
        for nested in _NESTED:
            columns_by_table[nested].update(getattr(point, nested))
    return (*_PLAIN, *(f"{nested}.{name}" for nested in _NESTED for name in sorted(columns_by_table[nested])))


def iter_series_file(format: FileFormat, columns: Sequence[str], pages: Pages) -> Iterator[bytes]:
    """Yield the bytes of the file. A metric that is not among `columns` is left out."""
    readers = [_make_reader(name) for name in columns]
    rows = ([[read(point) for read in readers] for point in page] for page in pages)
    types = [ColumnType.INTEGER if name in _INTEGERS else ColumnType.NUMBER for name in columns]
    return iter_table(format, columns, rows, types)


def _make_reader(column: str) -> Callable[[SeriesPoint], Any]:
    nested, _, name = column.partition(".")
    if name:
        return lambda point: getattr(point, nested).get(name)
    return lambda point: getattr(point, column)


_RANKS = re.compile(r"[0-9]{1,7}(-[0-9]{1,7})?(,[0-9]{1,7}(-[0-9]{1,7})?)*")


@router.route(
    "GET /system",
    Permission.JOBS_READ,
    "CPU, memory, GPU, network, disk and step phases of each rank over time",
)
def system(
    tx: Reading,
    job_id: JobId,
    metric: Annotated[
        SystemMetric,
        Query(description="`busy`: share of its time in which a rank waits for no other. A straggler has most."),
    ] = SystemMetric.BUSY,
    ranks: Annotated[
        str, Query(max_length=1000, description="Only these ranks: `0,4-7`. Empty: all ranks.", examples=["0,4-7"])
    ] = "",
    after: Annotated[
        float,
        Query(ge=0, allow_inf_nan=False, description="Only later than this time, in shorter intervals if they fit."),
    ] = 0.0,
) -> SystemColumns:
    """Returns at most 240 intervals at any age of the job. Shares of time are between 0 and 1; other metrics have
    their unit in their name."""
    return system_samples.read(tx, job_id, metric, ranks=parse_ranks(ranks), after=after)


def parse_ranks(text: str) -> RankSet | None:
    """Return the ranks that `0,4-7` names; None for all. Raises InvalidRequest."""
    if not text:
        return None
    if _RANKS.fullmatch(text) is None:
        raise InvalidRequest(f"ranks is {text!r}. Write numbers and ranges, for example 0,4-7.")
    parts = [tuple(map(int, part.split("-"))) for part in text.split(",")]
    return RankSet([(part[0], part[-1]) for part in parts])


class RankSet:
    """Ranges of ranks. They are not expanded, since a range may be large."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._ranges = ranges

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and any(first <= rank <= last for first, last in self._ranges)


Number = Annotated[int, Path(ge=1, le=2**31 - 1, description="Number of the profile, from 1.")]
FileName = Annotated[
    str, Path(pattern=TRACE_FILE.pattern, description="Name of one of its `files`: trace-rank0-g1.json.gz.")
]


class ProfileFileNotFound(ServiceError):
    kind = ProfileNotFound.kind


inspection_router = JsonRouter("/v1/jobs/{job_id}", "inspection", raises=[JobNotFound])


@inspection_router.route(
    "GET /stacks", Permission.JOBS_INSPECT, "What all workers of a job do now", raises=[RequestConflict, NotReady]
)
async def stacks(
    context: AppContext,
    job: Job,
    job_id: JobId,
    rank: Annotated[int | None, Query(ge=0, le=10_000_000, description="Only this rank.")] = None,
    native: Annotated[bool, Query(description="Also frames of native code; each worker is paused for it.")] = False,
) -> Stacks:
    """Returns the stacks of the training threads, clustered by equal ones, also of workers that hang or are
    stopped. It takes a second, and some seconds if a worker does not answer."""
    try:
        stacks = await context.cluster.stacks(job_id, rank=rank, native=native)
    except SupervisorUnavailable as error:
        raise NotReady(f"The supervisor of job {job_id} does not answer: {error}") from error
    if stacks is None:
        raise RequestConflict(job_id, job.status.state, "show stacks: this server drives no workers of it")
    return stacks


@inspection_router.route(
    "POST /profiles",
    Permission.JOBS_INSPECT,
    "Profile a rank of a running job",
    status=201,
    raises=[JobEnded, RequestConflict, ProfileOpen],
)
def request_profile(
    tx: Writing,
    context: AppContext,
    job_id: JobId,
    profile: Annotated[ProfileBody, body(ProfileBody, {"steps": 3, "rank": 0}, required=False)],
) -> ProfileView:
    """Profiles some steps of this rank from its next step boundary on, without stopping the job or changing a
    number. The answer comes at once; the profile has ended when its `state` is not `requested` any more (event
    `profile.taken` or `profile.failed`). A job has one open request at a time. If the group loses a worker
    meanwhile, the profile fails with a reason, and training goes on."""
    return supervisor_links.create(tx, job_id, profile, now=context.clock())


@inspection_router.route("GET /profiles", Permission.JOBS_READ, "Profiles of a job")
def list_profiles(tx: Reading, job_id: JobId) -> Page[ProfileView]:
    """Lists profiles, oldest first, each with the table of where the time of its steps went. The newest 8 are
    kept."""
    return Page[ProfileView].model_construct(items=tuple(supervisor_links.views(tx, job_id)))


@inspection_router.route("GET /profiles/{number}", Permission.JOBS_READ, "One profile", raises=[ProfileNotFound])
def get_profile(tx: Reading, job_id: JobId, number: Number) -> ProfileView:
    """Returns its state, the table of where the time of its steps went, and its files."""
    return supervisor_links.view(tx, job_id, number)


@inspection_router.route(
    "GET /profiles/{number}/files/{name}",
    Permission.JOBS_READ,
    "A file of a profile",
    responses={200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}},
    raises=[ProfileNotFound],
)
async def profile_file(context: AppContext, job: Job, job_id: JobId, number: Number, name: FileName) -> Response:
    """Compressed JSON: `trace-...` is a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing open
    as it is; `memory-...` is the timeline of what tensors took. Read from the storage of the job.
    """
    view = await run_in_threadpool(context.store.reading(supervisor_links.view), job_id, number)
    if name not in {file.name for file in view.files}:
        raise ProfileFileNotFound(f"Profile {number} of job {job_id} has no file {name}.")
    file = await context.storage.profile_file(job, number, name)
    if file is None:
        raise ProfileFileNotFound(f"{name} is not in the storage of job {job_id} any more, or not reachable here.")
    length, pieces = file
    headers = {
        "Content-Disposition": f'attachment; filename="{job_id}-profile-{number}-{name}"',
        "Content-Length": str(length),
    }
    return StreamingResponse(pieces, media_type="application/gzip", headers=headers)
