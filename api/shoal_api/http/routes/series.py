"""The route for the series of a job: JSON for programs that look, CSV and Parquet for those that keep it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from shoal_api.http.access.needs import needs
from shoal_api.http.context import MAX_SEQ, Context, JobId
from shoal_api.http.problem_types import Kind
from shoal_api.http.problems import ProblemError
from shoal_api.http.routes.series_files import MEDIA_TYPES, SeriesFormat, can_write, columns_of, pieces
from shoal_service.core.access import Permission
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.store import Store, histories
from shoal_service.views import Page

_MAX_POINTS = 1000
_ROWS_AT_ONCE = 5000
_TEXT: dict[str, Any] = {"schema": {"type": "string"}}
_FILES: dict[str, Any] = {"content": {media_type.partition(";")[0]: _TEXT for media_type in MEDIA_TYPES.values()}}


def routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["histories"])
    store = context.store

    @router.get(
        "/series",
        dependencies=[needs(Permission.JOBS_READ)],
        response_model=Page[SeriesPoint],
        summary="Loss, speed, world size and the task's own metrics over the steps",
        responses={200: _FILES},
    )
    async def series(
        job_id: JobId,
        max_points: Annotated[
            int | None,
            Query(
                ge=1,
                le=20_000,
                description="Longer series are down-sampled. Default: 1000 for json; csv and parquet have every step.",
            ),
        ] = None,
        after_step: Annotated[int, Query(ge=-1, le=MAX_SEQ, description="Only later steps.")] = -1,
        until_step: Annotated[int | None, Query(ge=0, le=MAX_SEQ, description="Only steps up to this one.")] = None,
        format: Annotated[SeriesFormat, Query(description="The form of the answer.")] = SeriesFormat.JSON,
    ) -> Response:
        """One point per completed step, or the mean of several. Values that are not finite are null.

        `csv` and `parquet`: a column for each field, and `metrics.NAME` and `val_metrics.NAME` for the task's own
        metrics. Parquet needs pyarrow on the server.
        """
        if not can_write(format):
            raise ProblemError(Kind.NOT_ACCEPTABLE, f"{format} needs pyarrow on the server; csv needs nothing.")
        points = await run_in_threadpool(
            store.reading(histories.read_series),
            job_id,
            after_step=after_step,
            until_step=until_step,
            max_points=max_points or _MAX_POINTS,
        )
        if format is SeriesFormat.JSON:
            page = Page[SeriesPoint].model_construct(items=tuple(points))
            return Response(page.model_dump_json(), media_type="application/json")
        pages = [points] if max_points or not points else _pages(store, job_id, after_step, points[-1].step)
        return StreamingResponse(
            pieces(format, columns_of(points), pages),
            media_type=MEDIA_TYPES[format],
            headers={"Content-Disposition": f'attachment; filename="{job_id}-series.{format}"'},
        )

    return router


def _pages(store: Store, job_id: str, after_step: int, until_step: int) -> Iterator[Sequence[SeriesPoint]]:
    """Every step in parts: the names of metrics are known from the means, which have each name of their steps."""
    while page := store.reading(histories.read_series_page)(
        job_id, after_step=after_step, until_step=until_step, limit=_ROWS_AT_ONCE
    ):
        yield page
        after_step = page[-1].step
