"""The table of jobs as a CSV or Parquet file: a row for each job that matches, in the order of the list.

    columns    id, name and state, then those that `columns` names; without any, the fields of the list
    rows       which jobs, and their order, are read once; then the jobs are read in pages, each as it is then

So each job is in the file once, also if it changes its place meanwhile, and a job that is deleted meanwhile is left
out. Memory holds the numbers of the jobs and one page of them. The rows of a Parquet file are read into a spool first.

The address is not below /v1/jobs/, where the id of a job follows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import Query
from starlette.responses import Response

from shoal_api.http.json_router import AppContext, Caller, JsonRouter
from shoal_api.http.parameters import (
    Archived,
    Descending,
    JobsOfCluster,
    JobsOfProjectAlone,
    JobsOfUser,
    Labels,
    Order,
    Search,
    Sort,
    States,
    Where,
    selection_of,
    selectors_of,
)
from shoal_api.http.problems import NotAcceptable
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
from shoal_service.store import Store, job_lists
from shoal_service.store.job_lists import FleetQuery, JobOrder
from shoal_service.views import JobSummary

MAX_CHOSEN = 500
NUM_JOBS = "X-Total-Count"
"""The header with the number of jobs that match."""
_AT_ONCE = 500
_FIRST = ("id", "name", "state")
_USUAL = tuple(name for name in JobSummary.model_fields if name != "values")


router = JsonRouter("/v1", "jobs")


@router.route(
    "GET /job-export",
    Permission.JOBS_READ,
    "The table of jobs as a file",
    responses={200: {"description": "The file, with the number of jobs in `X-Total-Count`.", **FILES}},
    raises=[NotAcceptable],
)
def export_jobs(
    context: AppContext,
    caller: Caller,
    format: Annotated[FileFormat, Query(description="The format of the file.")] = FileFormat.CSV,
    state: States = [],  # noqa: B006
    project: JobsOfProjectAlone = None,
    user: JobsOfUser = None,
    label: Labels = [],  # noqa: B006
    search: Search = "",
    cluster: JobsOfCluster = None,
    where: Where = "",
    sort: Sort = "",
    columns: Annotated[
        str,
        Query(
            max_length=4000,
            description="Names, separated by commas, of the columns after id, name and state. Default: the fields "
            "of `GET /v1/jobs`.",
        ),
    ] = "",
    archived: Archived = False,
    job: Annotated[
        list[str],
        Query(max_length=MAX_CHOSEN, description="Only the jobs with these ids, also if they are archived."),
    ] = [],  # noqa: B006
    order: Order = JobOrder.CREATED,
    descending: Descending = True,
    limit: Annotated[int | None, Query(ge=1, le=10_000_000, description="Jobs in the file; default: all.")] = None,
) -> Response:
    """Returns a file with a row for each job, newest first if `sort` and `order` name nothing. A list or a section
    is its JSON. CSV: text that a spreadsheet would run as a formula has an apostrophe before it. Parquet: a column
    of numbers is float if one is, and text if its values have several types; it needs pyarrow on the server."""
    require_writer(format)
    query = FleetQuery(
        search=search,
        states=frozenset(state),
        project=project,
        user=user,
        visible=caller.projects,
        labels=selectors_of(label),
        cluster=cluster,
        ids=frozenset(job),
        selection=selection_of(where, sort, columns, archived=archived or bool(job), now=context.clock()),
        order=order,
        descending=descending,
        limit=limit,
    )
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
