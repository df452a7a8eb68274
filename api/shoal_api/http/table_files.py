"""Makes CSV and Parquet files of tables, piece by piece. Called by the routes that answer with a file.

A table is names of columns and pages of rows. `iter_csv` and `iter_parquet` hold one page at a time, and the caller
chooses its length. `Spool` keeps rows whose types are not known before the last one has been read, since the types
of a Parquet file stand before its rows.

    value             CSV                                  Parquet
    None, NaN, inf    empty                                null
    true, false       true, false                          boolean
    list, section     its JSON                             its JSON
    text              with ' before it if a spreadsheet    as it is
                      would run it as a formula

The apostrophe is what OWASP advises against CSV injection: labels and notes are written by people other than the one
that opens the file. A text that reads as a number, such as -5, stays as it is, and so do numbers.

pyarrow is imported when a Parquet file is asked for, not before.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from starlette.responses import StreamingResponse

from shoal_api.answers import FileFormat
from shoal_api.http.problems import NotAcceptable

Row = Sequence[Any]
Pages = Iterable[Sequence[Row]]
_TEXT: dict[str, Any] = {"schema": {"type": "string"}}
_FORMULA = re.compile(r"[=+\-@\t\r\n]")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_IN_MEMORY_BYTES = 16 * 2**20
"""Rows of a spool beyond this go to a temporary file without a name."""
_INT64 = range(-(2**63), 2**63)


MEDIA_TYPES = {FileFormat.CSV: "text/csv; charset=utf-8", FileFormat.PARQUET: "application/vnd.apache.parquet"}
FILES: dict[str, Any] = {"content": {media_type.partition(";")[0]: _TEXT for media_type in MEDIA_TYPES.values()}}
"""The answer of a route with a file, for the document of the API."""


class ColumnType(StrEnum):
    """The type of a column of Parquet."""

    NOTHING = "null"
    """No row has a value."""
    SWITCH = "bool"
    INTEGER = "int64"
    NUMBER = "float64"
    TEXT = "string"


def require_writer(format: FileFormat) -> None:
    """Raises NotAcceptable if the library that writes this format is not installed."""
    if format is FileFormat.PARQUET and find_spec("pyarrow") is None:
        raise NotAcceptable(f"{format} needs pyarrow on the server; csv needs nothing.")


def file_response(
    format: FileFormat, name: str, pieces: Iterator[bytes], headers: dict[str, str] | None = None
) -> StreamingResponse:
    """Return the answer that a browser saves as `name` with the ending of the format."""
    disposition = {"Content-Disposition": f'attachment; filename="{name}.{format}"'}
    return StreamingResponse(pieces, media_type=MEDIA_TYPES[format], headers=disposition | (headers or {}))


def iter_table(
    format: FileFormat, names: Sequence[str], pages: Pages, types: Sequence[ColumnType] | None = None
) -> Iterator[bytes]:
    """Yield the bytes of the file.

    Args:
        types: of the columns, for Parquet; None if they are not known before all rows are read.
    """
    if format is FileFormat.CSV:
        yield from iter_csv(names, pages)
    elif types is not None:
        yield from iter_parquet(names, types, pages)
    else:
        with Spool(len(names)) as spool:
            for page in pages:
                spool.add(page)
            yield from iter_parquet(names, spool.types, spool.pages())


def iter_csv(names: Sequence[str], pages: Pages) -> Iterator[bytes]:
    """Yield the file: the names, then a piece for each page."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_convert_for_csv(name) for name in names])
    for page in pages:
        writer.writerows([_convert_for_csv(value) for value in row] for row in page)
        yield _take_text(text).encode()
    if rest := _take_text(text):
        yield rest.encode()


def iter_parquet(names: Sequence[str], types: Sequence[ColumnType], pages: Pages) -> Iterator[bytes]:
    """Yield the file: a row group for each page. A value must fit the type of its column; with TEXT each one does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = [pa.type_for_alias(column_type) for column_type in types]
    schema = pa.schema(list(zip(names, kinds, strict=True)))
    file = _Pipe()
    with pq.ParquetWriter(pa.PythonFile(file, mode="w"), schema) as writer:
        for page in pages:
            columns = [[_convert_for_parquet(row[at], kind) for row in page] for at, kind in enumerate(types)]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            yield file.take_bytes()
    yield file.take_bytes()


class Spool:
    """Keeps pages of rows until all have been read, and knows the types of their columns.

    Numbers are floats if one is; a column is text if its values have several types, or if an integer has more than 64
    bits. The rows are JSON, in memory or in a temporary file, which is deleted at the end of the `with` block.
    """

    def __init__(self, num_columns: int) -> None:
        self._types_by_column: list[set[ColumnType]] = [set() for _ in range(num_columns)]
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115
            max_size=_IN_MEMORY_BYTES, mode="w+", encoding="utf-8", newline="\n"
        )

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def add(self, page: Sequence[Row]) -> None:
        for row in page:
            for kinds, value in zip(self._types_by_column, row, strict=True):
                kinds.add(_find_type(value))
        self._file.write(json.dumps(page) + "\n")

    @property
    def types(self) -> tuple[ColumnType, ...]:
        return tuple(_merge_types(kinds - {ColumnType.NOTHING}) for kinds in self._types_by_column)

    def pages(self) -> Iterator[list[Row]]:
        """Yield the pages as they were added; lists and sections are lists and dictionaries again."""
        self._file.seek(0)
        for line in self._file:
            yield json.loads(line)


def _find_type(value: Any) -> ColumnType:
    match value:
        case None:
            return ColumnType.NOTHING
        case bool():
            return ColumnType.SWITCH
        case int():
            return ColumnType.INTEGER if value in _INT64 else ColumnType.TEXT
        case float():
            return ColumnType.NUMBER if math.isfinite(value) else ColumnType.NOTHING
        case _:
            return ColumnType.TEXT


def _merge_types(kinds: set[ColumnType]) -> ColumnType:
    if len(kinds) <= 1:
        return next(iter(kinds), ColumnType.NOTHING)
    return ColumnType.NUMBER if kinds == {ColumnType.INTEGER, ColumnType.NUMBER} else ColumnType.TEXT


def _convert_for_parquet(value: Any, kind: ColumnType) -> Any:
    """Return the value as pyarrow takes it in a column of this type."""
    value = _drop_non_finite(value)
    if value is None:
        return None
    if kind is ColumnType.NUMBER:
        return float(value)
    if kind is ColumnType.TEXT:
        return str(value) if isinstance(value, str) else json.dumps(value)
    return value


def _convert_for_csv(value: Any) -> Any:
    """Return the value as the CSV has it."""
    value = _drop_non_finite(value)
    if value is None:
        return ""
    if isinstance(value, bool | list | dict):
        return json.dumps(value)
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def _drop_non_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _take_text(text: io.StringIO) -> str:
    value = text.getvalue()
    text.seek(0)
    text.truncate()
    return value


class _Pipe(io.RawIOBase):
    """Collects what pyarrow writes, to be taken away after each piece."""

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

    def take_bytes(self) -> bytes:
        joined, self._pieces = b"".join(self._pieces), []
        return joined
