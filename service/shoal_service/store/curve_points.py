"""Few points of a job's curve, as rows of the columns that somebody wants, from the roll-ups of `curves.py`.

    least 60 points of a job with 100,000 steps: 195 buckets of 512 steps, then of 64 and 8, then steps

A read takes the widest buckets that give a curve at least `least` points, so it has at most eight times as many, and
some thirty for the end that is not rolled up yet. Used by `many_curves.py` and for the small curves of `job_lists.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Select, bindparam, select

from shoal_service.store.curves import WIDTHS
from shoal_service.store.database import Transaction
from shoal_service.store.tables import series, series_rollups

MAX_STEP = 2**62


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
    coarsest = max((width for width in WIDTHS if num_steps // width >= least), default=0)
    while True:
        rows = _pyramid(tx, num, coarsest, columns, after_step, until_step)
        # A job that goes on from another one's checkpoint has fewer steps than the number of its last one says.
        if coarsest == 0 or len(rows) >= least:
            return rows
        coarsest //= WIDTHS[0]
        coarsest = coarsest if coarsest in WIDTHS else 0


def _pyramid(
    tx: Transaction, num: int, coarsest: int, columns: tuple[str, ...], after_step: int, until_step: int
) -> list[Any]:
    """From the coarsest level as far as it is written, and from finer ones after that. Retention deletes steps, but not
    their roll-ups, so the finest level comes first if there are no steps at the beginning."""
    rows: list[Any] = []
    done = after_step
    for width in sorted((width for width in WIDTHS if width <= coarsest), reverse=True):
        bounds = {
            "of_job": num,
            "of_width": width,
            "from_bucket": max(done, 0) // width,
            "to_bucket": until_step // width,
        }
        found = tx.execute(_rolled(columns), bounds).all()
        rows += [row for row in found if row[0] > done]
        done = max(done, found[-1][0]) if found else done
    steps = tx.execute(_steps(columns), {"of_job": num, "after": done, "until": until_step}).all()
    if coarsest == 0 and not (steps and steps[0][0] <= max(done, 0) + WIDTHS[0]):
        pruned_until = steps[0][0] if steps else until_step
        bounds = {"of_job": num, "of_width": WIDTHS[0], "from_bucket": max(done, 0) // WIDTHS[0]}
        bounds["to_bucket"] = pruned_until // WIDTHS[0]
        rows += [row for row in tx.execute(_rolled(columns), bounds) if done < row[0] < pruned_until]
    return rows + list(steps)


@cache
def _rolled(columns: tuple[str, ...]) -> Select[Any]:
    of = series_rollups.c
    return (
        select(of.step, of.at, *(of[name] for name in columns))
        .where(
            of.job_num == bindparam("of_job"),
            of.width == bindparam("of_width"),
            of.bucket >= bindparam("from_bucket"),
            of.bucket < bindparam("to_bucket"),
        )
        .order_by(of.bucket)
    )


@cache
def _steps(columns: tuple[str, ...]) -> Select[Any]:
    of = series.c
    return (
        select(of.step, of.at, *(of[name] for name in columns))
        .where(of.job_num == bindparam("of_job"), of.step > bindparam("after"), of.step <= bindparam("until"))
        .order_by(of.step)
    )
