"""Reads how long the steps of the newest jobs took, for predictions of other jobs on the same hardware."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from sqlalchemy import select

from shoal_service.store.database import Transaction
from shoal_service.store.records import load_spec
from shoal_service.store.tables import jobs, series
from shoal_workers.contract.spec import JobSpec

_STEPS = 33
"""The newest steps of a job whose median counts; a job with fewer is left out. As many as measure a shard level."""


class JobSteps(NamedTuple):
    """The newest steps of one job, all with the same number of workers."""

    spec: JobSpec
    workers: int
    step_s: float
    """Median."""


def newest_steps(tx: Transaction, *, max_jobs: int = 8) -> list[JobSteps]:
    """Reads the jobs that changed last. Jobs of the user's own programs, whose sizes are unknown, are left out."""
    rows = tx.execute(select(jobs.c.num, jobs.c.spec_version).order_by(jobs.c.updated_at.desc()).limit(max_jobs))
    measured = []
    for num, version in rows.all():
        points = tx.execute(
            select(series.c.step_s, series.c.world_size, series.c.generation)
            .where(series.c.job_num == num, series.c.val_loss.is_(None))
            .order_by(series.c.step.desc())
            .limit(_STEPS)
        ).all()
        if len(points) < _STEPS or len({(point.world_size, point.generation) for point in points}) > 1:
            continue
        spec = load_spec(tx, num, version)
        if spec.program is None:
            measured.append(JobSteps(spec, points[0].world_size, median(point.step_s for point in points)))
    return measured
