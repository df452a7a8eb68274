"""What the jobs of a sweep have reached, read by primary keys: a look costs a few rows for each job of the sweep."""

from __future__ import annotations

import math

from sqlalchemy import Connection, func, select

from shoal_service.core.sweeps import AVERAGED_STEPS, Measure
from shoal_service.store.errors import SweepNotFound
from shoal_service.store.tables import job_labels, jobs, series, series_rollups
from shoal_workers.contract.spec import SWEEP_LABEL

MAX_COMPARED = 500
"""The newest jobs of the sweep."""


def members(connection: Connection, project: str, name: str) -> dict[str, int]:
    """Numbers of the jobs of a sweep by their ids."""
    query = (
        select(jobs.c.id, jobs.c.num)
        .join(job_labels, job_labels.c.job_num == jobs.c.num)
        .where(job_labels.c.key == SWEEP_LABEL, job_labels.c.value == name, jobs.c.project == project)
        .order_by(jobs.c.num.desc())
        .limit(MAX_COMPARED)
    )
    return {row.id: row.num for row in connection.execute(query)}


def reached(connection: Connection, nums: dict[str, int], measure: Measure) -> dict[str, int]:
    """The last step of each job for which it has a value; jobs without one are left out."""
    found: dict[str, int] = {}
    for job_id, num in nums.items():
        if measure is Measure.VALIDATION:
            query = select(series.c.step).where(series.c.job_num == num, series.c.val_loss.is_not(None))
            step = connection.execute(query.order_by(series.c.step.desc()).limit(1)).scalar_one_or_none()
        else:
            newest = select(func.max(series_rollups.c.bucket)).where(
                series_rollups.c.job_num == num, series_rollups.c.width == AVERAGED_STEPS
            )
            bucket = connection.execute(newest).scalar_one()
            step = None if bucket is None else (bucket + 1) * AVERAGED_STEPS
        if step is not None:
            found[job_id] = step
    return found


def values(connection: Connection, nums: dict[str, int], step: int, measure: Measure) -> dict[str, float]:
    """Values of the jobs that have one at this step."""
    ids = {num: job_id for job_id, num in nums.items()}
    if measure is Measure.VALIDATION:
        query = select(series.c.job_num, series.c.val_loss).where(
            series.c.job_num.in_(ids), series.c.step == step, series.c.val_loss.is_not(None)
        )
    else:
        query = select(series_rollups.c.job_num, series_rollups.c.loss).where(
            series_rollups.c.job_num.in_(ids),
            series_rollups.c.width == AVERAGED_STEPS,
            series_rollups.c.bucket == step // AVERAGED_STEPS - 1,
        )
    return {ids[num]: math.nan if value is None else value for num, value in connection.execute(query)}


def job_ids(connection: Connection, project: str, name: str) -> list[str]:
    """Ids of all jobs of a sweep, oldest first. Raises SweepNotFound."""
    query = (
        select(jobs.c.id)
        .join(job_labels, job_labels.c.job_num == jobs.c.num)
        .where(job_labels.c.key == SWEEP_LABEL, job_labels.c.value == name, jobs.c.project == project)
        .order_by(jobs.c.num)
    )
    found = list(connection.execute(query).scalars())
    if not found:
        raise SweepNotFound(project, name)
    return found
