"""Few points of a job's curve, as rows of the columns that somebody wants, from the roll-ups of `curves.py`.

    least 60 points of a job with 100,000 steps: 195 buckets of 512 steps, then of 64 and 8, then steps

A read takes the widest buckets that give a curve at least `least` points, so it has at most eight times as many, and
some thirty for the end that is not rolled up yet. Used by `many_curves.py` and for the small curves of `job_lists.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from sqlalchemy import Select, bindparam, select

from shoal_service.store.database import Transaction
from shoal_service.store.tables import series, series_rollups

MAX_STEP = 2**62
FACTOR = 8
WIDTHS = tuple(FACTOR**n for n in range(1, 7))
"""Steps per bucket of each level of roll-ups."""
_ROWS_AT_ONCE = 5_000


def points_of(
    tx: Transaction,
    num: int,
    columns: tuple[str, ...],
    *,
    least: int,
    last_step: int,
    after_step: int = -1,
    until_step: int = MAX_STEP,
) -> list[Any]:
    """Step, time and these columns of each point of job `num`, which has come to `last_step`.

    Args:
        least: points at least, if the job has as many steps after `after_step` and up to `until_step`.
    """
    num_steps = min(last_step, until_step) - max(after_step, 0)
    for width in sorted(WIDTHS, reverse=True):
        if num_steps // width >= least:
            rows = list(read_pyramid(tx, num, columns, coarsest=width, after_step=after_step, until_step=until_step))
            if len(rows) >= least:
                return rows
            # A job that goes on from another one's checkpoint has fewer steps than the number of its last one says.
    rows = list(read_steps(tx, num, columns, after_step, until_step))
    if rows and rows[0].step <= max(after_step, 0) + FACTOR:
        return rows
    pruned_until = rows[0].step if rows else until_step
    first = max(after_step, 0) // FACTOR
    rolled = read_buckets(tx, num, columns, FACTOR, first, pruned_until // FACTOR)
    return [row for row in rolled if after_step < row.step < pruned_until] + rows


def read_pyramid(
    tx: Transaction, num: int, columns: tuple[str, ...], *, coarsest: int, after_step: int, until_step: int
) -> Iterator[Any]:
    """Yield the coarsest level as far as it is written, and finer ones after that, down to the steps themselves."""
    done = after_step
    for width in sorted((width for width in WIDTHS if width <= coarsest), reverse=True):
        for row in read_buckets(tx, num, columns, width, max(done, 0) // width, until_step // width):
            if row.step > done:
                done = row.step
                yield row
    yield from read_steps(tx, num, columns, done, until_step)


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
