"""The comparison of two jobs, from their stored losses of every step. Called by `Store.parity`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sqlalchemy import Connection, select

from shoal_service.core.parity import compare, differences
from shoal_service.store.records import load, load_spec
from shoal_service.store.tables import series
from shoal_service.views import ParityView

_ROWS_AT_ONCE = 5_000


def parity(connection: Connection, job_id: str, against_id: str, *, tolerance: float, max_points: int) -> ParityView:
    """Raises JobNotFound."""
    job, against = load(connection, job_id), load(connection, against_id)
    losses, reference = _losses(connection, job.num), _losses(connection, against.num)
    report = compare(losses, reference, tolerance=tolerance, max_points=max_points)
    specs = [load_spec(connection, one.num, one.spec_version) for one in (job, against)]
    fields = dict(report) | {"differs_in": differences(*specs)}
    return ParityView(job_id=job.id, against_id=against.id, **fields)


def _losses(connection: Connection, job_num: int) -> Iterator[tuple[int, float]]:
    query = select(series.c.step, series.c.loss).where(series.c.job_num == job_num).order_by(series.c.step)
    rows = connection.execute(query.execution_options(yield_per=_ROWS_AT_ONCE))
    return ((step, math.nan if loss is None else loss) for step, loss in rows)
