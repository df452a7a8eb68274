"""Rows of files with several values each: JSON lines, Parquet, Arrow, CSV.

    source, ("text", "label")  ->  Record(values, place)  in the order of the file

A field is a column, or a path such as `translation.en` into a row's objects and lists. Hidden here: how each format is
read without the whole file in memory, and what is said about a row that lacks a field. `rows` reads the same formats
for a single field of text, from any row on. Called by `labelled`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from shoal_workers.contract.text_data import TextFormat
from shoal_workers.data.errors import BadRowError, MissingTextError
from shoal_workers.data.sources import SourceFile

_ROWS_PER_BATCH = 64
_SHOWN_FIELDS = 12
_SHOWN_LETTERS = 80
_MARK = b"\xef\xbb\xbf"
_ARROW_FILE = b"ARROW1"


@dataclass(frozen=True, slots=True)
class Record:
    values: tuple[Any, ...]
    """The value of each field, in the order in which they were asked for."""
    place: str
    """File and number of the row, for messages."""
    file: str
    """Path or URL of the file."""


def records_of(source: SourceFile, fields: Sequence[str]) -> Iterator[Record | BadRowError]:
    """All rows of a file, or what is wrong with one. Lines without content are left out.

    Raises:
        BadRowError: the whole file lacks a field.
        MissingTextError: the file cannot be read, is damaged, or has no rows.
    """
    read = _READERS.get(source.format)
    if read is None:
        raise MissingTextError(
            f"{source.place} is read as {source.format}, and the task needs rows: JSON lines, Parquet, Arrow or CSV. "
            "Name such files in data.paths, or set data.format."
        )
    with source.opened() as (stream, _):
        for number, row in read(source, stream, fields):
            place = f"{source.place}, row {number:,}"
            try:
                found = row if isinstance(row, BadRowError) else _record(row, fields, place, source.place)
            except BadRowError as error:
                found = error
            yield found


def _record(row: dict[str, Any], fields: Sequence[str], place: str, file: str) -> Record:
    return Record(tuple(_value_at(row, field, place) for field in fields), place, file)


def _value_at(row: dict[str, Any], field: str, place: str) -> Any:
    value: Any = row
    for name in [field] if field in row else field.split("."):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            has = _listed(list(value)) if isinstance(value, dict) else type(value).__name__
            raise BadRowError(
                f"{place}: field {field!r} is missing: at {name!r} there is {has}. Name the column, or the path in it, "
                "in the keys of data that end in _field."
            )
    return value


_Rows = Iterator[tuple[int, dict[str, Any] | BadRowError]]


def _json_lines(source: SourceFile, stream: BinaryIO, fields: Sequence[str]) -> _Rows:
    for number, line in enumerate(stream, 1):
        content = line.removeprefix(_MARK).strip() if number == 1 else line.strip()
        if not content:
            continue
        try:
            row: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            shown = content[:_SHOWN_LETTERS].decode(errors="replace")
            row = BadRowError(f"{source.place}, line {number:,} is not JSON ({error}): {shown}. Correct it.")
        if not isinstance(row, dict | BadRowError):
            row = BadRowError(f"{source.place}, line {number:,} is no object with fields. Write one object a line.")
        yield number, row


def _separated(source: SourceFile, stream: BinaryIO, fields: Sequence[str]) -> _Rows:
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    reader = csv.DictReader(text, delimiter="\t" if source.is_tab_separated else ",", strict=True)
    try:
        for number, row in enumerate(reader, 1):
            yield number, {name: value for name, value in row.items() if name is not None and value is not None}
    except (csv.Error, UnicodeDecodeError) as error:
        raise _damaged(source, error) from error
    text.detach()


def _parquet(source: SourceFile, stream: BinaryIO, fields: Sequence[str]) -> _Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(pyarrow.PythonFile(stream, mode="r"))
        columns = _columns(source, opened.schema_arrow.names, fields)
        batches = opened.iter_batches(_ROWS_PER_BATCH, columns=columns, use_threads=False)
        yield from _of_batches(batches, columns)
    except pyarrow.ArrowInvalid as error:
        raise _damaged(source, error) from error


def _arrow(source: SourceFile, stream: BinaryIO, fields: Sequence[str]) -> _Rows:
    """A file as pyarrow and Feather write it, or a stream as `datasets` writes it."""
    import pyarrow

    try:
        head = stream.read(len(_ARROW_FILE))
        stream.seek(0)
        handle = pyarrow.PythonFile(stream, mode="r")
        if head == _ARROW_FILE:
            opened: Any = pyarrow.ipc.open_file(handle)
            batches: Iterator[Any] = (opened.get_batch(number) for number in range(opened.num_record_batches))
        else:
            opened = batches = pyarrow.ipc.open_stream(handle)
        yield from _of_batches(batches, _columns(source, opened.schema.names, fields))
    except pyarrow.ArrowInvalid as error:
        raise _damaged(source, error) from error


def _columns(source: SourceFile, names: Sequence[str], fields: Sequence[str]) -> list[str]:
    """The columns that the fields are in; the others are not read."""
    found = [field if field in names else field.split(".")[0] for field in fields]
    for field, column in zip(fields, found, strict=True):
        if column not in names:
            raise BadRowError(
                f"{source.place} has no column {field!r}; it has {_listed(names)}. Name the column in the keys of data "
                "that end in _field."
            )
    return list(dict.fromkeys(found))


def _of_batches(batches: Iterator[Any], columns: Sequence[str]) -> _Rows:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
            rows = batch.slice(start, _ROWS_PER_BATCH).select(list(columns)).to_pylist()
            for row in rows:
                number += 1
                yield number, row


def _damaged(source: SourceFile, error: Exception) -> MissingTextError:
    return MissingTextError(
        f"{source.place} cannot be read as {source.format}: {error}. Write the file again, or set data.format if it "
        "has another format."
    )


_READERS: dict[TextFormat, Callable[[SourceFile, BinaryIO, Sequence[str]], _Rows]] = {
    TextFormat.JSONL: _json_lines,
    TextFormat.CSV: _separated,
    TextFormat.PARQUET: _parquet,
    TextFormat.ARROW: _arrow,
}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_FIELDS} more" if len(names) > _SHOWN_FIELDS else ""
    return (", ".join(map(str, names[:_SHOWN_FIELDS])) or "none") + more
