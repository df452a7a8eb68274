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

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from shoal_api.http.access.needs import needs, visible_projects
from shoal_api.http.context import Context
from shoal_api.http.documents import (
    ARCHIVED_JOBS,
    LABEL_FORMS,
    SEARCH_WORDS,
    SORT_FORMS,
    WHERE_FORMS,
    selection_of,
    selectors_of,
)
from shoal_api.http.routes.quotas import PROJECT_NAME, USER_NAME
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
from shoal_service.core.selection import MAX_SELECTORS
from shoal_service.core.where.fields import Field
from shoal_service.store import Store, job_lists
from shoal_service.store.job_lists import FleetQuery, JobOrder
from shoal_service.views import JobSummary
from shoal_workers.contract.job import JobState
from shoal_workers.contract.placing import CLUSTER_PATTERN

MAX_CHOSEN = 500
NUM_JOBS = "X-Total-Count"
"""The header with the number of jobs that match."""
_AT_ONCE = 500
_FIRST = ("id", "name", "state")
_USUAL = tuple(name for name in JobSummary.model_fields if name != "values")


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["jobs"])
    store = context.store

    @router.get(
        "/job-export",
        dependencies=[needs(Permission.JOBS_READ)],
        response_class=Response,
        summary="The table of jobs as a file",
        responses={200: {"description": "The file, with the number of jobs in `X-Total-Count`.", **FILES}},
    )
    async def export_jobs(
        request: Request,
        format: Annotated[FileFormat, Query(description="The format of the file.")] = FileFormat.CSV,
        state: Annotated[list[JobState], Query(max_length=20, description="Only jobs in one of these states.")] = [],  # noqa: B006
        project: Annotated[
            str | None, Query(pattern=PROJECT_NAME, description="Only jobs of this project, without those below it.")
        ] = None,
        user: Annotated[str | None, Query(pattern=USER_NAME, description="Only jobs of this user.")] = None,
        label: Annotated[list[str], Query(max_length=MAX_SELECTORS, description=LABEL_FORMS)] = [],  # noqa: B006
        search: Annotated[str, Query(max_length=200, description=SEARCH_WORDS)] = "",
        cluster: Annotated[
            str | None, Query(pattern=CLUSTER_PATTERN, description="Only jobs whose newest attempt has begun there.")
        ] = None,
        where: Annotated[str, Query(max_length=2000, description=WHERE_FORMS)] = "",
        sort: Annotated[str, Query(max_length=500, description=SORT_FORMS)] = "",
        columns: Annotated[
            str,
            Query(
                max_length=4000,
                description="Names, separated by commas, of the columns after id, name and state. Default: the fields "
                "of `GET /v1/jobs`.",
            ),
        ] = "",
        archived: Annotated[bool, Query(description=ARCHIVED_JOBS)] = False,
        job: Annotated[
            list[str],
            Query(max_length=MAX_CHOSEN, description="Only the jobs with these ids, also if they are archived."),
        ] = [],  # noqa: B006
        order: Annotated[
            JobOrder, Query(description="Used if `sort` names nothing. Jobs without the value come last.")
        ] = JobOrder.CREATED,
        descending: Annotated[bool, Query(description="The largest, or newest, first.")] = True,
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
            visible=visible_projects(request),
            labels=selectors_of(label),
            cluster=cluster,
            ids=frozenset(job),
            selection=selection_of(where, sort, columns, archived=archived or bool(job), now=context.clock()),
            order=order,
            descending=descending,
            limit=limit,
        )
        nums = await run_in_threadpool(store.reading(job_lists.nums), query)
        made = pieces(store, format, nums, query.selection.columns)
        return file_response(format, "jobs", made, {NUM_JOBS: str(len(nums))})

    return router


def pieces(store: Store, format: FileFormat, nums: array[int], columns: Sequence[Field]) -> Iterator[bytes]:
    """Yield the bytes of the file with the jobs of these numbers."""
    names = (*_FIRST, *(one.name for one in columns if one.name not in _FIRST)) if columns else _USUAL
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
