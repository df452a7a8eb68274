"""The series of a job: JSON for programs that look, CSV and Parquet for those that keep it.

    columns    the fields of a point, then metrics.NAME and val_metrics.NAME for each metric of the task's own
    rows       one per step, ascending; an absent value, and one that is not finite, is empty (Parquet: null)

Files are written in pieces on worker threads, so that a long job does not fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any

from fastapi import Query
from starlette.responses import Response

from shoal_api.http.json_router import AppContext, JsonRouter, json_response
from shoal_api.http.parameters import MAX_SEQ, JobId
from shoal_api.http.problems import NotAcceptable
from shoal_api.http.table_files import (
    FILES,
    ColumnType,
    FileFormat,
    csv_pieces,
    file_response,
    parquet_pieces,
    require_writer,
)
from shoal_service.core.access import Permission
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.store import JobNotFound, Store, histories
from shoal_service.views import Page

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


router = JsonRouter("/v1/jobs/{job_id}", "histories", raises=[JobNotFound])


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
    points = store.reading(histories.read_series)(
        job_id, after_step=after_step, until_step=until_step, max_points=max_points or _MAX_POINTS
    )
    if format is SeriesFormat.JSON:
        return json_response(Page[SeriesPoint].model_construct(items=tuple(points)))
    # columns come first in a file, so the means of all steps are read before the steps
    pages = [points] if max_points or not points else _pages(store, job_id, after_step, points[-1].step)
    file = FileFormat(format)
    return file_response(file, f"{job_id}-series", pieces(file, columns_of(points), pages))


def _pages(store: Store, job_id: str, after_step: int, until_step: int) -> Iterator[Sequence[SeriesPoint]]:
    """Yield every step, in parts. The names of metrics are known from the means, which have each name of their
    steps."""
    while page := store.reading(histories.read_series_page)(
        job_id, after_step=after_step, until_step=until_step, limit=_ROWS_AT_ONCE
    ):
        yield page
        after_step = page[-1].step


def columns_of(points: Iterable[SeriesPoint]) -> tuple[str, ...]:
    """Return the columns of a file with these points."""
    columns_by_table: dict[str, set[str]] = {nested: set() for nested in _NESTED}
    for point in points:
        for nested in _NESTED:
            columns_by_table[nested].update(getattr(point, nested))
    return (*_PLAIN, *(f"{nested}.{name}" for nested in _NESTED for name in sorted(columns_by_table[nested])))


def pieces(format: FileFormat, columns: Sequence[str], pages: Pages) -> Iterator[bytes]:
    """Yield the bytes of the file. A metric that is not among `columns` is left out."""
    readers = [_reader(name) for name in columns]
    rows = ([[read(point) for read in readers] for point in page] for page in pages)
    if format is FileFormat.CSV:
        return csv_pieces(columns, rows)
    types = [ColumnType.INTEGER if name in _INTEGERS else ColumnType.NUMBER for name in columns]
    return parquet_pieces(columns, types, rows)


def _reader(column: str) -> Callable[[SeriesPoint], Any]:
    nested, _, name = column.partition(".")
    if name:
        return lambda point: getattr(point, nested).get(name)
    return lambda point: getattr(point, column)
