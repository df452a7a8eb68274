"""The curves of all jobs of a sweep with a bounded number of rows, and what follows from them.

One query reads them: the steps themselves while there are few, otherwise the roll-ups of the finest level of which all
jobs together have few enough rows. http/routes/specs.py calls it; `core/sweeps.py` says which is the best so far.
"""

from __future__ import annotations

from sqlalchemy import Table, func, select

from shoal_service.core.sweeps import best_so_far
from shoal_service.fleet_views import SweepBest, SweepCurve, SweepCurves
from shoal_service.store.curve_points import WIDTHS
from shoal_service.store.database import Transaction
from shoal_service.store.errors import SweepNotFound
from shoal_service.store.sweep_jobs import nums_by_id
from shoal_service.store.tables import series, series_rollups

MAX_ROWS = 40_000
"""Rows that are read of all jobs together, about."""
MAX_POINTS = 400
"""Points of a curve, at most."""


def read(tx: Transaction, project: str, name: str, measure: str) -> SweepCurves:
    """`measure`: loss or val_loss. Of at most 500 jobs, the newest ones. Raises SweepNotFound."""
    nums = nums_by_id(tx, project, name)
    if not nums:
        raise SweepNotFound(project, name)
    ids = {num: job_id for job_id, num in nums.items()}
    table, width = _source(tx, list(ids))
    columns = (table.c.job_num, table.c.step, table.c.at, table.c[measure].label("value"))
    query = select(*columns).where(table.c.job_num.in_(ids), table.c[measure].is_not(None))
    if width:
        query = query.where(table.c.width == width)
    points: dict[str, list[tuple[int, float, float]]] = {job_id: [] for job_id in reversed(nums)}
    for row in tx.execute(query.order_by(table.c.job_num, table.c.step)):
        points[ids[row.job_num]].append((row.step, round(row.at, 2), float(f"{row.value:.6g}")))
    best = best_so_far((at, value, job_id) for job_id, curve in points.items() for _, at, value in curve)
    return SweepCurves(
        measure=measure,
        steps_per_point=width or 1,
        jobs=tuple(_curve(job_id, curve) for job_id, curve in points.items()),
        best=tuple(SweepBest(at=at, value=value, job=job_id) for at, value, job_id in best),
    )


def _curve(job_id: str, points: list[tuple[int, float, float]]) -> SweepCurve:
    step, at, value = zip(*points, strict=True) if points else ((), (), ())
    return SweepCurve(id=job_id, step=step, at=at, value=value)


def _source(tx: Transaction, nums: list[int]) -> tuple[Table, int]:
    """The table to read, and the width of its buckets; 0: the steps themselves."""
    furthest = 0
    for num in nums:  # each has an index with the answer at its end
        newest = tx.execute(select(func.max(series.c.step)).where(series.c.job_num == num)).scalar_one()
        furthest = max(furthest, newest or 0)
    for width in (0, *WIDTHS):
        num_points = furthest // (width or 1)
        if num_points <= MAX_POINTS and num_points * len(nums) <= MAX_ROWS:
            return (series_rollups, width) if width else (series, 0)
    return series_rollups, WIDTHS[-1]
