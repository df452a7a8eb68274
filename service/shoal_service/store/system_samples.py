"""System metrics of jobs: stored with the reports, rolled up, and read as columns.

    bucket    10 s      |||||||||||  the newest 240
             40 s   |   |   |   |    the newest 240         up to 11.4 h: each of four buckets of the level above it
    read     the finest level that has the whole range, and above it what is not rolled up yet

So a job has at most 1,680 rows at any age, each with all metrics of all ranks (`store/system_rows.py`). Hidden here:
which buckets are written and deleted when. `store/reporting.py` calls `add`, the route `/system` calls `read`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

from sqlalchemy import Row, delete, func, select

from shoal_service.core.system_metrics import (
    FACTOR,
    LEVELS,
    MAX_BUCKETS,
    SystemMetric,
    SystemSample,
    bucket_of,
    level_for,
)
from shoal_service.store.database import Transaction, upsert
from shoal_service.store.records import num_of
from shoal_service.store.system_rows import Pick, SystemRow, by_rank, in_buckets, metrics_of, pack, row_of, unpack
from shoal_service.store.tables import system_samples
from shoal_service.views import SystemColumns


class RankSet(Protocol):
    def __contains__(self, rank: object, /) -> bool: ...


def add(tx: Transaction, job_num: int, samples: Sequence[SystemSample]) -> None:
    """Stores new samples of a job, writes the buckets that they complete, and deletes the oldest ones."""
    if not samples:
        return
    finest, newest_at = LEVELS[0], samples[-1].at
    upsert(tx, system_samples, list(_documents(job_num, finest, in_buckets(map(row_of, samples), finest))))
    written = [finest]
    for below, width in pairwise(LEVELS):
        if not _roll_up(tx, job_num, below, width, until=bucket_of(newest_at, width)):
            break  # if no bucket of this width has ended, no longer one has
        written.append(width)
    for width in written:
        tx.execute(
            delete(system_samples).where(
                system_samples.c.job_num == job_num,
                system_samples.c.width_s == width,
                system_samples.c.bucket <= bucket_of(newest_at, width) - MAX_BUCKETS,
            )
        )


def read(
    tx: Transaction, job_id: str, metric: SystemMetric, *, ranks: RankSet | None = None, after: float = 0.0
) -> SystemColumns:
    """Reads one metric over time. `ranks`: only these; None means all. `after`: only later samples, finer if they are
    few. Raises JobNotFound."""
    job_num = num_of(tx, job_id)
    first_at, last_at = _extent(tx, job_num)
    if first_at is None or last_at is None or last_at <= after:
        return SystemColumns(metric=metric)
    width = level_for(max(first_at, after), last_at)
    rows = in_buckets(_rows_after(tx, job_num, width, after, {metric.value}), width)
    values = by_rank(rows, metric.value)
    shown = tuple(rank for rank in range(len(values)) if ranks is None or rank in ranks)
    return SystemColumns(
        metric=metric,
        width_s=width,
        at=tuple(round(row.at, 1) for row in rows),
        generation=tuple(row.generation for row in rows),
        ranks=shown,
        values=tuple(values[rank] for rank in shown),
        metrics=_known_metrics(tx, job_num),
    )


def _roll_up(tx: Transaction, job_num: int, below: float, width: float, *, until: int) -> bool:
    """Writes the buckets before `until` that are not written yet; whether there were any."""
    newest = tx.execute(
        select(func.max(system_samples.c.bucket)).where(
            system_samples.c.job_num == job_num, system_samples.c.width_s == width
        )
    ).scalar_one()
    query = (
        select(system_samples)
        .where(
            system_samples.c.job_num == job_num,
            system_samples.c.width_s == below,
            system_samples.c.bucket < until * FACTOR,
            system_samples.c.bucket >= (0 if newest is None else (newest + 1) * FACTOR),
        )
        .order_by(system_samples.c.bucket)
    )
    documents = list(_documents(job_num, width, in_buckets((_row(row, "all") for row in tx.execute(query)), width)))
    upsert(tx, system_samples, documents)
    return bool(documents)


def _extent(tx: Transaction, job_num: int) -> tuple[float | None, float | None]:
    query = select(func.min(system_samples.c.at), func.max(system_samples.c.at))
    first, last = tx.execute(query.where(system_samples.c.job_num == job_num)).one()
    return first, last


def _rows_after(tx: Transaction, job_num: int, coarsest: float, after: float, pick: Pick) -> Iterator[SystemRow]:
    """Rows after a time, from the coarsest level as far as it is written, and from finer ones after that."""
    for width in sorted((width for width in LEVELS if width <= coarsest), reverse=True):
        query = (
            select(system_samples)
            .where(
                system_samples.c.job_num == job_num,
                system_samples.c.width_s == width,
                system_samples.c.at > after,
            )
            .order_by(system_samples.c.bucket)
        )
        for row in tx.execute(query):
            after = row.at
            yield _row(row, pick)


def _known_metrics(tx: Transaction, job_num: int) -> tuple[SystemMetric, ...]:
    """The metrics that the newest sample has."""
    query = select(system_samples).where(system_samples.c.job_num == job_num, system_samples.c.width_s == LEVELS[0])
    row = tx.execute(query.order_by(system_samples.c.bucket.desc()).limit(1)).one()
    named = metrics_of(row.data)
    return tuple(metric for metric in SystemMetric if metric.value in named)


def _documents(job_num: int, width: float, rows: Iterable[SystemRow]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {
            "job_num": job_num,
            "width_s": int(width),
            "bucket": bucket_of(row.at, width),
            "at": row.at,
            "generation": row.generation,
            "data": pack(row),
        }


def _row(stored: Row[Any], pick: Pick) -> SystemRow:
    return SystemRow(stored.at, stored.generation, unpack(stored.data, pick))
