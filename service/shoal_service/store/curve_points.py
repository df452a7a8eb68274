"""Reads few points of a job's curve, as rows of the requested columns, from the roll-ups of `curves.py`.

    at least 60 points of a job with 100,000 steps: 195 buckets of 512 steps, then of 64 and 8, then steps

A read takes the widest buckets that give a curve at least `min_points` points, so it has at most eight times as many,
and some thirty for the end that is not rolled up yet. Where old rows of a level were deleted (store/thinning.py, and
retention of ended jobs) it takes the next coarser one. For `many_curves.py`, and the small curves of `job_lists.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from sqlalchemy import Column, ColumnElement, ScalarSelect, Select, bindparam, func, select

from shoal_service.store.database import Transaction
from shoal_service.store.tables import jobs, series, series_rollups

MAX_STEP = 2**62
FACTOR = 8
WIDTHS = tuple(FACTOR**n for n in range(1, 7))
"""Steps per bucket of each level of roll-ups."""
_ROWS_AT_ONCE = 5_000
_THINNED_UNTIL = select(jobs.c.thinned_until).where(jobs.c.num == bindparam("of_job"))


def _end(of: Any, column: Column[int], *conditions: ColumnElement[bool]) -> ScalarSelect[Any]:
    """Select the smallest or largest value, in a separate query, which the end of an index answers."""
    return select(of(column)).where(column.table.c.job_num == bindparam("of_job"), *conditions).scalar_subquery()


_EXTENT = select(
    _end(func.min, series.c.step).label("first"),
    _end(func.max, series.c.step).label("last"),
    *(_end(func.min, series_rollups.c.bucket, series_rollups.c.width == width) for width in WIDTHS),
    ((_end(func.max, series_rollups.c.bucket, series_rollups.c.width == FACTOR) + 1) * FACTOR).label("rolled_until"),
)


def read_points(
    tx: Transaction,
    num: int,
    columns: tuple[str, ...],
    *,
    min_points: int,
    last_step: int,
    after_step: int = -1,
    until_step: int = MAX_STEP,
) -> list[Any]:
    """Return step, time and these columns of each point of job `num`, whose newest step is `last_step`.

    Args:
        min_points: points at least, if the job has as many steps after `after_step` and up to `until_step`.
    """
    num_steps = min(last_step, until_step) - max(after_step, 0)
    for width in sorted(WIDTHS, reverse=True):
        if num_steps // width >= min_points:
            rows = list(read_pyramid(tx, num, columns, coarsest=width, after_step=after_step, until_step=until_step))
            if len(rows) >= min_points:
                return rows
            # A job that goes on from another one's checkpoint has fewer steps than the number of its last one says.
    return list(read_pyramid(tx, num, columns, coarsest=1, after_step=after_step, until_step=until_step))


def read_extent(tx: Transaction, num: int) -> tuple[int, int] | None:
    """Return the first and the last step of the job's curve; None if it has no step.

    A level begins earlier than the finer one only if old rows of that were deleted: a job that goes on from another
    job's checkpoint begins within a bucket.
    """
    row = tx.execute(_EXTENT, {"of_job": num}).one()
    first, last = row.first, row.last
    for width, bucket in zip(WIDTHS, row[2:-1], strict=True):
        if bucket is not None and (first is None or (bucket + 1) * width < first):
            first = bucket * width + 1
    if first is None:
        return None
    return first, last if last is not None else row.rolled_until


def read_pyramid(
    tx: Transaction,
    num: int,
    columns: tuple[str, ...],
    *,
    coarsest: int,
    after_step: int,
    until_step: int,
    with_singles: bool = True,
) -> Iterator[Any]:
    """Yield the level `coarsest` (1: the steps themselves) as far as it is written, and finer ones after that; before
    it, where old rows of it were deleted, the next coarser ones.

    Args:
        with_singles: also the steps that stayed where the others were deleted; of the steps themselves only.
    """
    thinned = tx.execute(_THINNED_UNTIL, {"of_job": num}).scalar_one() if coarsest == 1 else 0
    rows = _read_down(tx, num, columns, coarsest, max(after_step, min(thinned, until_step)), until_step)
    first = next(rows, None)
    begin = until_step if first is None else first.step - coarsest
    head = {row.step: row for row in _read_up(tx, num, columns, coarsest * FACTOR, after_step, begin)}
    if with_singles and after_step < thinned:
        head |= {row.step: row for row in read_steps(tx, num, columns, after_step, min(thinned, until_step))}
    for step in sorted(head):
        yield head[step]
    if first is not None:
        yield first
        yield from rows


def _read_down(
    tx: Transaction, num: int, columns: tuple[str, ...], coarsest: int, after: int, until: int
) -> Iterator[Any]:
    """Yield the rows of a level, and of finer ones what is not rolled up yet."""
    done = after
    for width in sorted((width for width in WIDTHS if width <= coarsest), reverse=True):
        for row in read_buckets(tx, num, columns, width, max(done, 0) // width, until // width):
            if row.step > done:
                done = row.step
                yield row
    yield from read_steps(tx, num, columns, done, until)


def _read_up(tx: Transaction, num: int, columns: tuple[str, ...], width: int, after: int, until: int) -> Iterator[Any]:
    """Yield the rows of a level up to the step at which the finer one begins, and of coarser ones what it lacks."""
    if width <= WIDTHS[-1] and until > max(after, 0):
        rows = list(read_buckets(tx, num, columns, width, max(after, 0) // width, until // width))
        begin = rows[0].step - width if rows else until
        yield from _read_up(tx, num, columns, width * FACTOR, after, begin)
        yield from (row for row in rows if row.step > after)


def read_buckets(
    tx: Transaction, num: int, columns: tuple[str, ...], width: int, first: int, end: int
) -> Iterator[Any]:
    """Yield the roll-ups over `width` steps with the numbers from `first` up to, but without `end`."""
    bounds = {"of_job": num, "of_width": width, "from_bucket": first, "to_bucket": end}
    yield from tx.execute(_rolled(columns), bounds)


def read_steps(tx: Transaction, num: int, columns: tuple[str, ...], after: int, until: int) -> Iterator[Any]:
    """Yield the steps after `after` up to `until`."""
    query = _steps(columns)
    if "metrics" in columns:  # large rows, and there may be a million: the database keeps those that are not read yet
        query = query.execution_options(yield_per=_ROWS_AT_ONCE)
    yield from tx.execute(query, {"of_job": num, "after": after, "until": until})


@cache
def _rolled(columns: tuple[str, ...]) -> Select[Any]:
    of = series_rollups.c
    query = select(of.step, of.at, *(of[name] for name in columns)).where(
        of.job_num == bindparam("of_job"),
        of.width == bindparam("of_width"),
        of.bucket >= bindparam("from_bucket"),
        of.bucket < bindparam("to_bucket"),
    )
    return query.order_by(of.bucket)


@cache
def _steps(columns: tuple[str, ...]) -> Select[Any]:
    of = series.c
    query = select(of.step, of.at, *(of[name] for name in columns)).where(
        of.job_num == bindparam("of_job"), of.step > bindparam("after"), of.step <= bindparam("until")
    )
    return query.order_by(of.step)
