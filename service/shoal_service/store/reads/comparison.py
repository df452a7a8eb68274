"""Two jobs compared: their stored losses, every step of both, in one read."""

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
    report = compare(
        job.id,
        _losses(connection, job.num),
        against.id,
        _losses(connection, against.num),
        tolerance=tolerance,
        max_points=max_points,
    )
    specs = [load_spec(connection, one.num, one.spec_version) for one in (job, against)]
    return report.model_copy(update={"differs_in": differences(*specs)})


def _losses(connection: Connection, job_num: int) -> Iterator[tuple[int, float]]:
    query = select(series.c.step, series.c.loss).where(series.c.job_num == job_num).order_by(series.c.step)
    rows = connection.execute(query.execution_options(yield_per=_ROWS_AT_ONCE))
    return ((step, math.nan if loss is None else loss) for step, loss in rows)
