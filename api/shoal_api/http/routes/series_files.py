"""A job's series as a file: CSV by the standard library, Parquet by pyarrow. Written in pieces, so that a long job does
not fill the memory.

    columns    the fields of a point, then metrics.NAME and val_metrics.NAME for each metric of the task's own
    rows       one per step, ascending; an absent value, and one that is not finite, is empty (Parquet: null)

Iterated on worker threads, by the route of the series. Never imports pyarrow before a Parquet file is asked for.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from importlib.util import find_spec
from typing import Any

from shoal_service.core.downsampling import SeriesPoint

_NESTED = ("metrics", "val_metrics")
_PLAIN = tuple(name for name in SeriesPoint.model_fields if name not in _NESTED)
_INTEGERS = ("step", "world_size", "generation")
Pages = Iterable[Sequence[SeriesPoint]]


class SeriesFormat(StrEnum):
    """How a series is answered."""

    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


MEDIA_TYPES = {SeriesFormat.CSV: "text/csv; charset=utf-8", SeriesFormat.PARQUET: "application/vnd.apache.parquet"}


def can_write(format: SeriesFormat) -> bool:
    """Whether what writes it is installed."""
    return format is not SeriesFormat.PARQUET or find_spec("pyarrow") is not None


def columns_of(points: Iterable[SeriesPoint]) -> tuple[str, ...]:
    """The columns of a file with these points."""
    found: dict[str, set[str]] = {nested: set() for nested in _NESTED}
    for point in points:
        for nested in _NESTED:
            found[nested].update(getattr(point, nested))
    return (*_PLAIN, *(f"{nested}.{name}" for nested in _NESTED for name in sorted(found[nested])))


def pieces(format: SeriesFormat, columns: Sequence[str], pages: Pages) -> Iterator[bytes]:
    """The bytes of the file. A metric that is not among `columns` is left out."""
    yield from (_csv if format is SeriesFormat.CSV else _parquet)(columns, pages)


def _csv(columns: Sequence[str], pages: Pages) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    readers = [_reader(name) for name in columns]
    for page in pages:
        writer.writerows([read(point) for read in readers] for point in page)
        yield _taken(text).encode()
    if rest := _taken(text):
        yield rest.encode()


def _parquet(columns: Sequence[str], pages: Pages) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = [pa.int64() if name in _INTEGERS else pa.float64() for name in columns]
    schema = pa.schema(list(zip(columns, kinds, strict=True)))
    readers = [_reader(name) for name in columns]
    file = _Pipe()
    with pq.ParquetWriter(pa.PythonFile(file, mode="w"), schema) as writer:
        for page in pages:
            arrays = [pa.array([read(p) for p in page], kind) for read, kind in zip(readers, kinds, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            yield file.taken()
    yield file.taken()


def _reader(column: str) -> Callable[[SeriesPoint], Any]:
    nested, _, name = column.partition(".")
    if name:
        return lambda point: getattr(point, nested).get(name)
    return lambda point: _finite(getattr(point, column))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _taken(text: io.StringIO) -> str:
    value = text.getvalue()
    text.seek(0)
    text.truncate()
    return value


class _Pipe(io.RawIOBase):
    """What pyarrow writes, to be taken away after each piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._position += len(piece)
        return len(piece)

    def taken(self) -> bytes:
        found, self._pieces = b"".join(self._pieces), []
        return found
