"""System metrics of jobs: stored with the reports, rolled up, and read as columns.

    bucket    10 s      |||||||||||  the newest 240
             40 s   |   |   |   |    the newest 240         up to 11.4 h: each of four buckets of the level above it
    read     the finest level that has the whole range, and above it what is not rolled up yet

So a job has at most 1,680 rows at any age. A row has all metrics of all ranks: 32-bit numbers, compressed, so that a
job with 1,024 ranks is small and one metric is read without the others. Hidden here: that form, and which buckets are
written and deleted when. `store/reporting.py` calls `add`, the route `/system` calls `read`.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

from sqlalchemy import Row, delete, func, select

from shoal_service.core.system_metrics import (
    FACTOR,
    LEVELS,
    MAX_BUCKETS,
    SystemMetric,
    SystemSample,
    bucket_of,
    in_buckets,
    level_for,
    rounded,
)
from shoal_service.store.database import Transaction, upsert
from shoal_service.store.records import num_of
from shoal_service.store.tables import system_samples
from shoal_service.views import SystemColumns

_FASTEST = 1
"""Level of zlib: the numbers have few repeated bytes, which a higher level would not find either."""
_Pick = Collection[str] | Literal["all"]


class RankSet(Protocol):
    def __contains__(self, rank: object, /) -> bool: ...


def add(tx: Transaction, job_num: int, samples: Sequence[SystemSample]) -> None:
    """Stores new samples of a job, writes the buckets that they complete, and deletes the oldest ones."""
    if not samples:
        return
    finest, newest_at = LEVELS[0], samples[-1].at
    upsert(tx, system_samples, list(_rows(job_num, finest, in_buckets(samples, finest))))
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
    """Reads one metric over time. `ranks`: only these; None: all. `after`: only later samples, finer if they are few.
    Raises JobNotFound."""
    job_num = num_of(tx, job_id)
    first_at, last_at = _extent(tx, job_num)
    if first_at is None or last_at is None or last_at <= after:
        return SystemColumns(metric=metric)
    width = level_for(max(first_at, after), last_at)
    found = list(_samples(tx, job_num, width, after, {metric.value}))
    samples = in_buckets(found, width)
    num_ranks = max((len(row) for sample in samples for row in sample.values.values()), default=0)
    shown = tuple(rank for rank in range(num_ranks) if ranks is None or rank in ranks)
    rows = [sample.values.get(metric.value, ()) for sample in samples]
    return SystemColumns(
        metric=metric,
        width_s=width,
        at=tuple(round(sample.at, 1) for sample in samples),
        generation=tuple(sample.generation for sample in samples),
        ranks=shown,
        values=tuple(tuple(row[rank] if rank < len(row) else None for row in rows) for rank in shown),
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
    rows = list(_rows(job_num, width, in_buckets((_sample(row, "all") for row in tx.execute(query)), width)))
    upsert(tx, system_samples, rows)
    return bool(rows)


def _extent(tx: Transaction, job_num: int) -> tuple[float | None, float | None]:
    query = select(func.min(system_samples.c.at), func.max(system_samples.c.at))
    first, last = tx.execute(query.where(system_samples.c.job_num == job_num)).one()
    return first, last


def _samples(tx: Transaction, job_num: int, coarsest: float, after: float, pick: _Pick) -> Iterator[SystemSample]:
    """Samples after a time, from the coarsest level as far as it is written, and from finer ones after that."""
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
            yield _sample(row, pick)


def _known_metrics(tx: Transaction, job_num: int) -> tuple[SystemMetric, ...]:
    """The metrics that the newest sample has."""
    query = select(system_samples).where(system_samples.c.job_num == job_num, system_samples.c.width_s == LEVELS[0])
    row = tx.execute(query.order_by(system_samples.c.bucket.desc()).limit(1)).one()
    named = _unpack(row.data, "all")
    return tuple(metric for metric in SystemMetric if metric.value in named)


def _rows(job_num: int, width: float, samples: Iterable[SystemSample]) -> Iterator[dict[str, Any]]:
    for sample in samples:
        yield {
            "job_num": job_num,
            "width_s": int(width),
            "bucket": bucket_of(sample.at, width),
            "at": sample.at,
            "generation": sample.generation,
            "data": _pack(sample.values),
        }


def _sample(row: Row[Any], pick: _Pick) -> SystemSample:
    return SystemSample.model_construct(at=row.at, generation=row.generation, values=_unpack(row.data, pick))


def _pack(values: dict[str, tuple[float | None, ...]]) -> bytes:
    """A length, a JSON object of names and numbers of ranks, then the values of each."""
    header = json.dumps({name: len(row) for name, row in values.items()}, separators=(",", ":")).encode()
    numbers = [math.nan if value is None else value for row in values.values() for value in row]
    return zlib.compress(struct.pack("<I", len(header)) + header + struct.pack(f"<{len(numbers)}f", *numbers), _FASTEST)


def _unpack(data: bytes, pick: _Pick) -> dict[str, tuple[float | None, ...]]:
    raw = zlib.decompress(data)
    (length,) = struct.unpack_from("<I", raw)
    offset = 4 + length
    values: dict[str, tuple[float | None, ...]] = {}
    for name, count in json.loads(raw[4:offset]).items():
        if pick == "all" or name in pick:
            row = struct.unpack_from(f"<{count}f", raw, offset)
            values[name] = tuple(None if math.isnan(value) else rounded(value) for value in row)
        offset += 4 * count
    return values
