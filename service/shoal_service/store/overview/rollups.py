"""Roll-ups of a job's series: means over 8, 64, 512 ... steps, so that a view reads some thousand rows at any length.

    level 4096   |===============================|
    level  512   |===|===|===|===|===|===|===|===|===|===|
    level   64                                           |=|=|=|
    level    8                                                 |.|.|
    series                                                         ....      a read takes the coarse level first, and
                                                                             goes down for what is not rolled up yet

A bucket is written when its last step is stored, from the eight buckets below it. After a rollback the buckets of the
steps that are computed again are written again when their last step is. `store/reports.py` calls `roll_up`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, bindparam, func, select

from shoal_service.core.downsampling import bucket_steps, downsample
from shoal_service.store.database import upsert
from shoal_service.store.tables import series, series_rollups
from shoal_service.views import SeriesPoint

_FACTOR = 8
WIDTHS = tuple(_FACTOR**n for n in range(1, 7))
"""Steps per bucket of each level."""
_MAX_ROWS = 4_000
"""Rows of the coarsest level that a read takes, before it makes means of them."""
_ROWS_AT_ONCE = 5_000
_VALUES = (
    "step",
    "at",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "step_s",
    "world_size",
    "generation",
    "val_loss",
    "metrics",
    "val_metrics",
)  # fmt: skip - a list of names
_POINTS = select(*(series.c[name] for name in _VALUES))
_ROLLED = select(*(series_rollups.c[name] for name in _VALUES))

_NEWEST_BUCKET = select(func.max(series_rollups.c.bucket)).where(
    series_rollups.c.job_num == bindparam("of_job"), series_rollups.c.width == bindparam("of_width")
)


def roll_up(connection: Connection, job_num: int, first_step: int, last_step: int) -> None:
    """After the steps from `first_step` to `last_step` were stored: writes each bucket that they complete, and those
    that are missing before."""
    for width in WIDTHS:
        if last_step // width <= (first_step - 1) // width:
            return  # no bucket of this width ends here, so none of a larger one does
        known = connection.execute(_NEWEST_BUCKET, {"of_job": job_num, "of_width": width}).scalar_one()
        begin = min((first_step - 1) // width, 0 if known is None else known + 1)
        _write(connection, job_num, width, begin, last_step // width)


def read(
    connection: Connection, job_num: int, *, after_step: int, until_step: int | None, max_points: int
) -> list[SeriesPoint]:
    """The steps after `after_step` up to `until_step`; means over equal buckets if they are more than `max_points`."""
    within = (series.c.job_num == job_num) & (series.c.step > after_step)
    if until_step is not None:
        within &= series.c.step <= until_step
    first, last = _ends(connection, series.c.step, within)
    rolled = _rolled_extent(connection, job_num, after_step, until_step)
    # Retention deletes whole buckets. A job that goes on from another one's checkpoint begins within a bucket.
    is_pruned = rolled is not None and (first is None or -(-rolled[0] // _FACTOR) * _FACTOR < first)
    if rolled is not None and is_pruned:
        first, last = rolled[0], rolled[1] if last is None else last
    if first is None:
        return []
    num_steps = last - first + 1
    levels = [width for width in WIDTHS if num_steps > _MAX_ROWS and num_steps // width >= max_points]
    coarsest = next((width for width in levels if num_steps // width <= _MAX_ROWS), levels[-1] if levels else 0)
    points = _pyramid(connection, job_num, first, last, max(coarsest, _FACTOR) if is_pruned else coarsest)
    if num_steps <= max_points:
        return list(points)
    return downsample(points, first_step=first, width=bucket_steps(first, last, max_points))


def _ends(connection: Connection, column: Column[int], within: ColumnElement[bool]) -> tuple[Any, Any]:
    """Smallest and largest value, None if there is none. Each by a query of its own: SQLite uses an index for one of
    them alone, and reads a million rows for both together."""
    lowest, highest = (select(of(column)).where(within).scalar_subquery() for of in (func.min, func.max))
    first, last = connection.execute(select(lowest, highest)).one()
    return first, last


def _rolled_extent(
    connection: Connection, job_num: int, after_step: int, until_step: int | None
) -> tuple[int, int] | None:
    """First and last step of the buckets of the finest level in that range. Retention deletes the steps below them."""
    within = (series_rollups.c.job_num == job_num) & (series_rollups.c.width == _FACTOR)
    within &= series_rollups.c.bucket >= max(0, after_step) // _FACTOR
    if until_step is not None:
        within &= series_rollups.c.bucket < until_step // _FACTOR
    first, last = _ends(connection, series_rollups.c.bucket, within)
    return None if first is None else (max(first * _FACTOR, after_step) + 1, (last + 1) * _FACTOR)


def rolled_until(connection: Connection, job_num: int) -> int:
    """The steps up to this one are in roll-ups of the finest level, so that a curve can do without them."""
    bucket = connection.execute(_NEWEST_BUCKET, {"of_job": job_num, "of_width": _FACTOR}).scalar_one()
    return 0 if bucket is None else (bucket + 1) * _FACTOR


def _pyramid(connection: Connection, job_num: int, first: int, last: int, coarsest: int) -> Iterator[SeriesPoint]:
    """The steps of [first, last], by the coarsest level where it is written, and by finer ones after that."""
    done = first - 1
    for width in sorted((width for width in WIDTHS if width <= coarsest), reverse=True):
        query = _ROLLED.where(
            series_rollups.c.job_num == job_num,
            series_rollups.c.width == width,
            series_rollups.c.bucket >= done // width,  # the first one may begin before
            series_rollups.c.bucket < last // width,
        ).order_by(series_rollups.c.bucket)
        for row in connection.execute(query):
            done = max(done, row.step)
            yield point_of(row)
    query = _POINTS.where(series.c.job_num == job_num, series.c.step > done, series.c.step <= last)
    for row in connection.execute(query.order_by(series.c.step).execution_options(yield_per=_ROWS_AT_ONCE)):
        yield point_of(row)


def _write(connection: Connection, job_num: int, width: int, begin: int, end: int) -> None:
    """Buckets [begin, end) of one level, from the level below."""
    points = _below(connection, job_num, width, begin, end)
    rows: list[dict[str, Any]] = []
    for point in downsample(points, first_step=begin * width + 1, width=width):
        values = {name: storable(value) for name, value in point.model_dump(include=set(_VALUES)).items()}
        rows.append({"job_num": job_num, "width": width, "bucket": (point.step - 1) // width, **values})
    upsert(connection, series_rollups, rows)


def _below(connection: Connection, job_num: int, width: int, begin: int, end: int) -> Iterable[SeriesPoint]:
    if width == _FACTOR:
        query = _POINTS.where(
            series.c.job_num == job_num, series.c.step > begin * width, series.c.step <= end * width
        ).order_by(series.c.step)
    else:
        query = _ROLLED.where(
            series_rollups.c.job_num == job_num,
            series_rollups.c.width == width // _FACTOR,
            series_rollups.c.bucket >= begin * _FACTOR,
            series_rollups.c.bucket < end * _FACTOR,
        ).order_by(series_rollups.c.bucket)
    return (point_of(row) for row in connection.execute(query.execution_options(yield_per=_ROWS_AT_ONCE)))


def point_of(row: Any) -> SeriesPoint:
    """From a row of the series or of its roll-ups; without validation, since there are many."""
    return SeriesPoint.model_construct(
        step=row.step,
        at=row.at,
        loss=math.nan if row.loss is None else row.loss,
        grad_norm=math.nan if row.grad_norm is None else row.grad_norm,
        lr=row.lr,
        tokens_per_s=row.tokens_per_s,
        step_s=row.step_s,
        world_size=row.world_size,
        generation=row.generation,
        val_loss=row.val_loss,
        metrics=json.loads(row.metrics) if row.metrics else {},
        val_metrics=json.loads(row.val_metrics) if row.val_metrics else {},
    )


def storable(value: Any) -> Any:
    """A field of a point as its column holds it: NULL for NaN and for no metrics, else metrics as JSON."""
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":")) if value else None
    return None if isinstance(value, float) and math.isnan(value) else value
