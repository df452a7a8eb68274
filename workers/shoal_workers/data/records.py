"""Rows of files: JSON lines, Parquet, Arrow, CSV.

    source, ("text", "label")  ->  Row(values or Fault, place)  in the order of the file, from any row on

A field is a column, or a path such as `translation.en` into a row's objects and lists (`value_at`). Hidden here: how
each format is read without the whole file in memory, how its end is checked, and what is said about a row that cannot
be read. Called by `rows` (documents of text) and by `labelled` (examples of several values).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from shoal_workers.contract.text_data import TextFormat
from shoal_workers.data.errors import BadRowError, MissingTextError
from shoal_workers.data.sources import SourceFile

_ROWS_PER_BATCH = 256
_ROWS_AT_ONCE = 16
"""Rows that are Python objects at a time: a row may have a minute of audio as numbers."""
_SHOWN_FIELDS = 12
_SHOWN_LETTERS = 80
_LARGEST_CSV_FIELD = 1 << 28
_MARK = b"\xef\xbb\xbf"
_ARROW_FILE = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a row."""

    reason: str
    way_out: str
    """What to do, as the begin of a sentence."""


class Row(NamedTuple):
    """A tuple, because files have millions of them."""

    values: dict[str, Any] | Fault
    number: int
    """The number of the row or of the line, from 1 on."""
    read_bytes: int
    """Bytes of the file that have been read, for the progress."""
    file: str
    unit: str = "row"

    @property
    def place(self) -> str:
        """File and number, for messages."""
        return f"{self.file}, {self.unit} {self.number:,}"


@dataclass(frozen=True, slots=True)
class Record:
    values: tuple[Any, ...]
    """The value of each field, in the order in which they were asked for."""
    place: str
    """File and number of the row, for messages."""
    file: str
    """Path or URL of the file."""


def read_records(source: SourceFile, fields: Sequence[str]) -> Iterator[Record | BadRowError]:
    """All rows of a file, or what is wrong with one.

    Raises:
        BadRowError: the whole file lacks a field.
        MissingTextError: the file cannot be read, is damaged, or has no rows.
    """
    if source.format not in _READERS:
        raise MissingTextError(
            f"{source.location} is read as {source.format}, and the task needs rows: JSON lines, Parquet, Arrow or "
            "CSV. Name such files in data.paths, or set data.format."
        )
    way_out = "Name the column, or the path in it, in the keys of data that end in _field"
    for row in read_rows(source, fields, way_out):
        row_values = row.values
        values = (
            () if isinstance(row_values, Fault) else tuple(value_at(row_values, field, way_out) for field in fields)
        )
        fault = next((value for value in (row_values, *values) if isinstance(value, Fault)), None) or not_utf8(values)
        if fault is None:
            yield Record(values, row.place, source.location)
        else:
            yield BadRowError(f"{row.place}: {fault.reason}. {fault.way_out}.")


def read_rows(
    source: SourceFile,
    fields: Sequence[str],
    way_out: str,
    first: int = 0,
    check: Callable[[Any], None] = lambda schema: None,
) -> Iterator[Row]:
    """Rows from number `first` on, counted from 0. Lines without content are left out. Bytes of text that are not UTF-8
    are surrogates in the values.

    Args:
        fields: columns, or paths in them; the other columns may be missing in the rows. None means all columns.
        way_out: what to do about a missing column, as the begin of a sentence.
        check: gets the schema of Parquet and Arrow; raises BadRowError.

    Raises:
        BadRowError: the file has no such column.
        MissingTextError: the file cannot be read, or is damaged.
    """
    with source.open() as (stream, read_bytes):
        yield from _READERS[source.format](_File(source, tuple(fields), way_out, stream, read_bytes, check), first)


def value_at(row: dict[str, Any], field: str, way_out: str) -> Any:
    """Return the value of a row in a field: a field of this very name, else a path of names and numbers of elements.
    Returns a Fault if there is none."""
    value: Any = row
    for name in [field] if field in row else field.split("."):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            has = list_names(list(value)) if isinstance(value, dict) else describe_kind(value)
            return Fault(f"field {field!r} is missing: at {name!r} there is {has}", way_out)
    return value


def describe_kind(value: object) -> str:
    """What a value of JSON is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def list_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN_FIELDS} more" if len(names) > _SHOWN_FIELDS else ""
    return (", ".join(map(str, names[:_SHOWN_FIELDS])) or "none") + more


def not_utf8(values: Sequence[Any]) -> Fault | None:
    """What is wrong with texts that have bytes or characters that UTF-8 has not."""
    for value in values:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                shown = value[max(0, error.start - _SHOWN_LETTERS // 2) : error.end].encode(errors="backslashreplace")
                return Fault(f"is not UTF-8: {shown.decode()}", "Convert the file")
    return None


@dataclass(frozen=True, slots=True)
class _File:
    source: SourceFile
    fields: tuple[str, ...]
    way_out: str
    stream: BinaryIO
    read_bytes: Callable[[], int]
    check: Callable[[Any], None]

    def columns(self, names: Sequence[str]) -> list[str]:
        """Those that the fields are in. Raises BadRowError if the file lacks one."""
        if not self.fields:
            return list(names)
        columns = [field if field in names else field.split(".")[0] for field in self.fields]
        for field, column in zip(self.fields, columns, strict=True):
            if column not in names:
                raise BadRowError(
                    f"{self.source.location} has no column {field!r}; it has {list_names(names)}. {self.way_out}."
                )
        return list(dict.fromkeys(columns))

    def damaged(self, error: object) -> MissingTextError:
        return MissingTextError(
            f"{self.source.location} cannot be read as {self.source.format}: {error}. Write the file again, or set "
            "data.format if it has another format."
        )


def _json_lines(file: _File, first: int) -> Iterator[Row]:
    for number, line in enumerate(file.stream, 1):
        content = line.removeprefix(_MARK).strip() if number == 1 else line.strip()
        if number > first and content:
            yield Row(_parse_json(content), number, file.read_bytes(), file.source.location, "line")


def _parse_json(line: bytes) -> dict[str, Any] | Fault:
    try:
        value = json.loads(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        shown = line[:_SHOWN_LETTERS].decode(errors="replace")
        return Fault(f"is not JSON ({error}): {shown}", "Correct it, or set data.format if it has another format")
    if not isinstance(value, dict):
        return Fault(f"is {describe_kind(value)}, not an object with fields", "Write one object a line")
    return value


def _separated(file: _File, first: int) -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_CSV_FIELD))  # 128 KiB by default
    text = io.TextIOWrapper(file.stream, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter="\t" if file.source.is_tab_separated else ",", strict=True)
    try:
        yield from _csv_rows(file, reader, first)
    finally:
        text.detach()


def _csv_rows(file: _File, reader: Any, first: int) -> Iterator[Row]:
    try:
        names: list[str] = next(reader, [])
    except csv.Error as error:
        raise file.damaged(error) from error
    places = {name: names.index(name) for name in file.columns(names)} if names else {}
    number = 0
    while True:
        values: dict[str, Any] | Fault
        try:
            cells = next(reader, None)
        except csv.Error as error:
            values = Fault(f"is not CSV near line {reader.line_num:,} ({error})", "Correct it")
        else:
            if cells is None:
                return
            if not cells:
                continue
            if len(cells) == len(names):
                values = {name: cells[place] for name, place in places.items()}
            else:
                has = f"(line {reader.line_num:,}) has {len(cells)} columns, not {len(names)} as the first line"
                values = Fault(has, "Correct it")
        number += 1
        if number > first:
            yield Row(values, number, file.read_bytes(), file.source.location)


def _parquet(file: _File, first: int) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(pyarrow.PythonFile(file.stream, mode="r"), page_checksum_verification=True)
        columns = file.columns(opened.schema_arrow.names)
        file.check(opened.schema_arrow)
        groups: list[int] = []
        skipped = 0
        for group in range(opened.num_row_groups):
            num_rows = opened.metadata.row_group(group).num_rows
            if not groups and skipped + num_rows <= first:
                skipped += num_rows
            else:
                groups.append(group)
        batches = opened.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=columns, use_threads=False)
        share = file.source.num_bytes / max(1, opened.metadata.num_rows)
        yield from _batch_rows(file, batches, columns, skipped, first, lambda number: int(number * share))
    except pyarrow.ArrowException as error:
        raise file.damaged(error) from error


def _arrow(file: _File, first: int) -> Iterator[Row]:
    """A file as pyarrow and Feather write it, or a stream as `datasets` writes it."""
    import pyarrow

    try:
        head = file.stream.read(len(_ARROW_FILE))
        file.stream.seek(max(0, file.source.num_bytes - len(_STREAM_END)))
        if head != _ARROW_FILE:
            refuse_cut_stream(file.stream.read())
        file.stream.seek(0)
        handle = pyarrow.PythonFile(file.stream, mode="r")
        if head == _ARROW_FILE:
            opened: Any = pyarrow.ipc.open_file(handle)
            batches: Iterator[Any] = (opened.get_batch(number) for number in range(opened.num_record_batches))
        else:
            opened = batches = pyarrow.ipc.open_stream(handle)
        columns = file.columns(opened.schema.names)
        file.check(opened.schema)
        yield from _batch_rows(file, batches, columns, 0, first, lambda _: file.read_bytes())
    except (pyarrow.ArrowException, EOFError) as error:
        raise file.damaged(error) from error


def refuse_cut_stream(tail: bytes) -> None:
    """Raises EOFError if these last bytes of a stream of Arrow do not end it: readers take the end of the file for its
    end, also where the file is cut between two batches."""
    if not tail.endswith(_STREAM_END):
        raise EOFError("the stream has no end, so the file is cut or was not closed")


def _batch_rows(
    file: _File,
    batches: Iterator[Any],
    columns: Sequence[str],
    number: int,
    first: int,
    read_bytes: Callable[[int], int],
) -> Iterator[Row]:
    """`number`: of the first row of the batches, from 0 on."""
    for batch in batches:
        batch.validate(full=True)  # offsets that are damaged lead out of the memory, and pyarrow follows them
        for start in range(max(0, first - number), batch.num_rows, _ROWS_AT_ONCE):
            rows = batch.slice(start, _ROWS_AT_ONCE).select(list(columns)).to_pylist()
            for row_number, values in enumerate(rows, number + start + 1):
                yield Row(values, row_number, read_bytes(row_number), file.source.location)
        number += batch.num_rows


_READERS: dict[TextFormat, Callable[[_File, int], Iterator[Row]]] = {
    TextFormat.JSONL: _json_lines,
    TextFormat.CSV: _separated,
    TextFormat.PARQUET: _parquet,
    TextFormat.ARROW: _arrow,
}
