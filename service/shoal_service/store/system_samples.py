"""System metrics of jobs: stored with the reports, rolled up, and read as columns.

    bucket    10 s      |||||||||||  the newest 240
             40 s   |   |   |   |    the newest 240         up to 11.4 h: each of four buckets of the level above it
    read     the finest level that has the whole range, and above it what is not rolled up yet

    row      zlib( length | {"busy": 1024, "data": 1024, ...} | busy of rank 0, 1, ... | data of rank 0, 1, ... | ... )

So a job has at most 1,680 rows at any age, each with all metrics of all ranks in one bucket, as 32-bit columns; NaN:
not measured. Columns stay arrays from the bytes of one row to those of the next one: a job with 1,024 ranks has 18,432
numbers a row, and as Python objects, averaged and rounded one at a time, they took most of the time of `add`. Hidden
here: which buckets are written and deleted when. `store/reporting.py` calls `add`, the route `/system` calls `read`.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
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
from shoal_service.store.database import Transaction, system_samples, upsert
from shoal_service.store.records import read_job_num
from shoal_service.views import SystemColumns

_FASTEST = 1
"""Level of zlib: the numbers have few repeated bytes, which a higher level would not find either."""
_STORED = np.dtype("<f4")
_DIGITS = 7
"""Decimal digits that a 32-bit number has, and that are shown."""
_LARGEST_EXACT_POWER = 22
"""10**22 is the largest power of ten that is a 64-bit number without a rounding error."""

Column = NDArray[np.float32]
"""A value of each rank."""
Pick = Collection[str] | Literal["all"]
"""Names of metrics."""


@dataclass(frozen=True)
class SystemRow:
    """The metrics of all ranks in one bucket."""

    at: float
    """Time of the last sample in it."""
    generation: int
    columns: dict[str, Column]
    """By name of the metric."""


def make_row(sample: SystemSample) -> SystemRow:
    """Makes a row of a sample. A number that is not finite, or too large for 32 bits, counts as not measured."""
    columns = {}
    for name, values in sample.values.items():
        with np.errstate(over="ignore"):
            column = np.array(values, dtype=np.float64).astype(_STORED)
        column[~np.isfinite(column)] = np.nan
        columns[name] = column
    return SystemRow(sample.at, sample.generation, columns)


def in_buckets(rows: Iterable[SystemRow], width_s: float) -> list[SystemRow]:
    """One row for each bucket that has any; the times of `rows` ascend."""
    buckets = groupby(rows, lambda row: bucket_of(row.at, width_s))
    return [mean([*bucket]) for _, bucket in buckets]


def mean(rows: Sequence[SystemRow]) -> SystemRow:
    """The mean of some rows, at least one; the last one's time and generation. A rank that some of them lack has the
    mean of the others."""
    if len(rows) == 1:
        return rows[0]
    last = rows[-1]
    names = dict.fromkeys(name for row in rows for name in row.columns)
    return SystemRow(
        last.at,
        last.generation,
        {name: _average([row.columns[name] for row in rows if name in row.columns]) for name in names},
    )


def _average(columns: Sequence[Column]) -> Column:
    total = np.zeros(max(map(len, columns)))
    count = np.zeros(len(total))
    for column in columns:
        known = ~np.isnan(column)
        total[: len(column)] += np.where(known, column, 0.0)
        count[: len(column)] += known
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: none of them has the rank
        return (total / count).astype(_STORED)


def pack(row: SystemRow) -> bytes:
    header = json.dumps({name: len(column) for name, column in row.columns.items()}, separators=(",", ":")).encode()
    numbers = b"".join(column.astype(_STORED, copy=False).tobytes() for column in row.columns.values())
    return zlib.compress(struct.pack("<I", len(header)) + header + numbers, _FASTEST)


def unpack(data: bytes, pick: Pick) -> dict[str, Column]:
    """The columns of these metrics, as far as the row has them."""
    raw, names, offset = _unpack_header(data)
    columns = {}
    for name, count in names.items():
        if pick == "all" or name in pick:
            columns[name] = np.frombuffer(raw, _STORED, count, offset)
        offset += _STORED.itemsize * count
    return columns


def list_metrics(data: bytes) -> Collection[str]:
    """Names of the metrics that a row has."""
    return _unpack_header(data)[1].keys()


def _unpack_header(data: bytes) -> tuple[bytes, dict[str, int], int]:
    """What is in the bytes, the number of ranks by metric, and where the numbers begin."""
    raw = zlib.decompress(data)
    (length,) = struct.unpack_from("<I", raw)
    offset = struct.calcsize("<I") + length
    return raw, json.loads(raw[4:offset]), offset


def by_rank(rows: Sequence[SystemRow], metric: str) -> list[tuple[float | None, ...]]:
    """One metric over time: for each rank a value of each row. None if not measured, or the row has no such rank."""
    columns = [row.columns.get(metric, np.empty(0, _STORED)) for row in rows]
    table = np.full((max(map(len, columns), default=0), len(columns)), np.nan)
    for index, column in enumerate(columns):
        table[: len(column), index] = column
    shown = _round(table).astype(object)
    shown[np.isnan(table)] = None
    return list(map(tuple, shown.tolist()))


def _round(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """To as many digits as a 32-bit number has, so that JSON is short: 0.1 in place of 0.10000000149011612. A product
    or a quotient of two exact numbers is the number closest to the decimal, from 1e-16 to 1e28. Smaller numbers have
    fewer digits, larger ones more."""
    with np.errstate(divide="ignore", invalid="ignore"):
        magnitude = np.floor(np.log10(np.abs(values)))
    decimals = _DIGITS - 1 - np.where(np.isfinite(magnitude), magnitude, 0.0)
    up = 10.0 ** np.clip(decimals, 0, _LARGEST_EXACT_POWER)
    down = 10.0 ** np.clip(-decimals, 0, _LARGEST_EXACT_POWER)
    rounded: NDArray[np.float64] = np.rint(values * up / down) / up * down
    return rounded


class RankSet(Protocol):
    def __contains__(self, rank: object, /) -> bool:
        """Return True if this rank is shown."""


def add(tx: Transaction, job_num: int, samples: Sequence[SystemSample]) -> None:
    """Stores new samples of a job, writes the buckets that they complete, and deletes the oldest ones."""
    if not samples:
        return
    finest, newest_at = LEVELS[0], samples[-1].at
    upsert(tx, system_samples, list(_make_documents(job_num, finest, in_buckets(map(make_row, samples), finest))))
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
    job_num = read_job_num(tx, job_id)
    extent = select(func.min(system_samples.c.at), func.max(system_samples.c.at))
    first_at, last_at = tx.execute(extent.where(system_samples.c.job_num == job_num)).one()
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
    documents = list(
        _make_documents(job_num, width, in_buckets((_make_row(row, "all") for row in tx.execute(query)), width))
    )
    upsert(tx, system_samples, documents)
    return bool(documents)


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
            yield _make_row(row, pick)


def _known_metrics(tx: Transaction, job_num: int) -> tuple[SystemMetric, ...]:
    """The metrics that the newest sample has."""
    query = select(system_samples).where(system_samples.c.job_num == job_num, system_samples.c.width_s == LEVELS[0])
    row = tx.execute(query.order_by(system_samples.c.bucket.desc()).limit(1)).one()
    named = list_metrics(row.data)
    return tuple(metric for metric in SystemMetric if metric.value in named)


def _make_documents(job_num: int, width: float, rows: Iterable[SystemRow]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {
            "job_num": job_num,
            "width_s": int(width),
            "bucket": bucket_of(row.at, width),
            "at": row.at,
            "generation": row.generation,
            "data": pack(row),
        }


def _make_row(stored: Row[Any], pick: Pick) -> SystemRow:
    return SystemRow(stored.at, stored.generation, unpack(stored.data, pick))
