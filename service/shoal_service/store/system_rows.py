"""A row of system metrics: all metrics of all ranks in one bucket, as 32-bit columns. Arithmetic and bytes, no SQL.

    bytes    zlib( length | {"busy": 1024, "data": 1024, ...} | busy of rank 0, 1, ... | data of rank 0, 1, ... | ... )

NaN: not measured. Columns stay arrays from the bytes of one row to those of the next one: a job with 1,024 ranks has
18,432 numbers a row, and as Python objects, averaged and rounded one at a time, they took most of the time of `add`.
`store/system_samples.py` decides which rows are read, written and deleted.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shoal_service.core.system_metrics import SystemSample, bucket_of

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


def row_of(sample: SystemSample) -> SystemRow:
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
    result: list[SystemRow] = []
    bucket: list[SystemRow] = []
    for row in rows:
        if bucket and bucket_of(bucket[-1].at, width_s) != bucket_of(row.at, width_s):
            result.append(mean(bucket))
            bucket = []
        bucket.append(row)
    return [*result, mean(bucket)] if bucket else result


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
        {name: _mean([row.columns[name] for row in rows if name in row.columns]) for name in names},
    )


def _mean(columns: Sequence[Column]) -> Column:
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
    raw, names, offset = _opened(data)
    columns = {}
    for name, count in names.items():
        if pick == "all" or name in pick:
            columns[name] = np.frombuffer(raw, _STORED, count, offset)
        offset += _STORED.itemsize * count
    return columns


def metrics_of(data: bytes) -> Collection[str]:
    """Names of the metrics that a row has."""
    return _opened(data)[1].keys()


def _opened(data: bytes) -> tuple[bytes, dict[str, int], int]:
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
    shown = _rounded(table).astype(object)
    shown[np.isnan(table)] = None
    return list(map(tuple, shown.tolist()))


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
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
