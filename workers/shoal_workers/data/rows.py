"""Text in files that consist of rows: JSON lines, Parquet, Arrow, CSV. Each row is one document.

    source, data.field  ->  Row(text, end, read_bytes)  in the order of the file, from any row on

Hidden here: how each format is read without the whole file in memory, what a field path such as `message.content` or
`turns.0.text` means in it, and what is said about a row without text. Called by `documents`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from shoal_workers.contract.text_data import BadRows, TextDataConfig, TextFormat
from shoal_workers.data.errors import BadRowError, MissingTextError
from shoal_workers.data.sources import SourceFile

_ROWS_PER_BATCH = 256
_SHOWN_FIELDS = 12
_SHOWN_LETTERS = 80
_LARGEST_CSV_FIELD = 1 << 28
_MARK = b"\xef\xbb\xbf"
_ARROW_FILE = b"ARROW1"


@dataclass(frozen=True, slots=True)
class Row:
    text: bytes | None
    """As in the file, perhaps not UTF-8; None: a bad row that is left out."""
    end: int
    """Rows of the file up to this one."""
    read_bytes: int
    """Bytes of the file that have been read, for the progress."""


def rows_of(source: SourceFile, config: TextDataConfig, first: int) -> Iterator[Row]:
    """Rows from number `first` on, counted from 0. Lines without content are left out.

    Raises:
        BadRowError: a row has no text in the field, and `data.bad_rows` is "refuse"; or the file has no such column.
        MissingTextError: the file cannot be read, or is damaged.
    """
    with source.opened() as (stream, read_bytes):
        yield from _READERS[source.format](_File(source, config, stream, read_bytes), first)


@dataclass(frozen=True, slots=True)
class _File:
    source: SourceFile
    config: TextDataConfig
    stream: BinaryIO
    read_bytes: Callable[[], int]

    def row(self, text: bytes | str | _Fault, number: int, read_bytes: int, place: str = "row") -> Row:
        """`number`: of this row, from 1 on."""
        if isinstance(text, _Fault):
            if self.config.bad_rows is BadRows.SKIP:
                return Row(None, number, read_bytes)
            raise BadRowError(
                f"{self.source.place}, {place} {number:,}: {text.words}. {text.way_out}or set data.bad_rows: "
                '"skip" to leave such rows out.'
            )
        return Row(_encoded(text) if isinstance(text, str) else text, number, read_bytes)

    def no_column(self, names: Sequence[str]) -> BadRowError:
        return BadRowError(
            f"{self.source.place} has no column {self.config.field!r}; it has {_listed(names)}. Set data.field to the "
            "column of the text."
        )

    def damaged(self, error: Exception) -> MissingTextError:
        return MissingTextError(
            f"{self.source.place} cannot be read as {self.source.format}: {error}. Write the file again, or set "
            "data.format if it has another format."
        )


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong with a row."""

    words: str
    way_out: str


def _json_lines(file: _File, first: int) -> Iterator[Row]:
    for number, line in enumerate(file.stream, 1):
        content = line.removeprefix(_MARK).strip() if number == 1 else line.strip()
        if number <= first or not content:
            continue
        yield file.row(_of_json(content, file.config.field), number, file.read_bytes(), "line")


def _of_json(line: bytes, field: str) -> str | bytes | _Fault:
    try:
        value = json.loads(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError) as error:
        shown = line[:_SHOWN_LETTERS].decode(errors="replace")
        return _Fault(f"is not JSON ({error}): {shown}", 'Correct it, set data.format: "text" to read lines as text, ')
    if not isinstance(value, dict):
        return _Fault(f"is {_kind(value)}, not an object with fields", "Write one object a line, ")
    return _text_at(value, field)


def _text_at(row: dict[str, Any], field: str) -> str | bytes | _Fault:
    """The text of a row in a field: a field of this very name, else a path of names and numbers of elements."""
    value: Any = row
    for name in [field] if field in row else field.split("."):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            has = _listed(list(value)) if isinstance(value, dict) else _kind(value)
            what = "has" if isinstance(value, dict) else "there is"
            return _Fault(
                f"field {field!r} is missing: at {name!r} it {what} {has}", "Set data.field to that of the text, "
            )
    if not isinstance(value, str | bytes):
        return _Fault(f"field {field!r} is {_kind(value)}, not text", "Set data.field to that of the text, ")
    return value


def _separated(file: _File, first: int) -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_CSV_FIELD))  # 128 KiB by default
    text = io.TextIOWrapper(file.stream, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter="\t" if file.source.is_tab_separated else ",", strict=True)
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise file.damaged(error) from error
    if not names:
        return
    if file.config.field not in names:
        raise file.no_column(names)
    column, number = names.index(file.config.field), 0
    while True:
        try:
            cells = next(reader, None)
            fault = None
        except csv.Error as error:
            cells, fault = [], _Fault(f"is not CSV near line {reader.line_num:,} ({error})", "Correct it, ")
        if cells is None:
            break
        if not cells and fault is None:
            continue
        number += 1
        if number <= first:
            continue
        if fault is None and len(cells) != len(names):
            fault = _Fault(
                f"(line {reader.line_num:,}) has {len(cells)} columns, not {len(names)} as the first line",
                "Correct it, ",
            )
        yield file.row(fault or cells[column], number, file.read_bytes())
    text.detach()


def _parquet(file: _File, first: int) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(pyarrow.PythonFile(file.stream, mode="r"))
        column = _column(file, opened.schema_arrow)
        groups: list[int] = []
        skipped = 0
        for group in range(opened.num_row_groups):
            num_rows = opened.metadata.row_group(group).num_rows
            if not groups and skipped + num_rows <= first:
                skipped += num_rows
            else:
                groups.append(group)
        batches = opened.iter_batches(_ROWS_PER_BATCH, row_groups=groups, columns=[column], use_threads=False)
        share = file.source.num_bytes / max(1, opened.metadata.num_rows)
        yield from _of_batches(file, batches, column, skipped, first, lambda number: int(number * share))
    except pyarrow.ArrowInvalid as error:
        raise file.damaged(error) from error


def _arrow(file: _File, first: int) -> Iterator[Row]:
    """A file as pyarrow and Feather write it, or a stream as `datasets` writes it."""
    import pyarrow

    try:
        head = file.stream.read(len(_ARROW_FILE))
        file.stream.seek(0)
        handle = pyarrow.PythonFile(file.stream, mode="r")
        if head == _ARROW_FILE:
            opened: Any = pyarrow.ipc.open_file(handle)
            batches: Iterator[Any] = (opened.get_batch(number) for number in range(opened.num_record_batches))
        else:
            opened = batches = pyarrow.ipc.open_stream(handle)
        column = _column(file, opened.schema)
        yield from _of_batches(file, batches, column, 0, first, lambda _: file.read_bytes())
    except pyarrow.ArrowInvalid as error:
        raise file.damaged(error) from error


def _column(file: _File, schema: Any) -> str:
    """The column that a field is in. Raises BadRowError if there is none, or if no row can have text there."""
    import pyarrow.types as types

    field = file.config.field
    path = [field] if field in schema.names else field.split(".")
    if path[0] not in schema.names:
        raise file.no_column(schema.names)
    found = schema.field(path[0]).type
    for name in path[1:]:
        if types.is_struct(found) and found.get_field_index(name) >= 0:
            found = found.field(name).type
        elif (types.is_list(found) or types.is_large_list(found)) and name.isdecimal():
            found = found.value_type
        else:
            raise BadRowError(
                f"{file.source.place}: field {field!r} is missing: at {name!r} there is {found}. Set data.field to the "
                "path of the text."
            )
    kind = found.value_type if types.is_dictionary(found) else found
    is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    if not any(test(kind) for test in is_text):
        columns = [f"{one.name} ({one.type})" for one in schema]
        raise BadRowError(
            f"{file.source.place}: field {field!r} is {found}, not text; the columns are {_listed(columns)}. Set "
            "data.field to the column of the text."
        )
    return str(path[0])


def _of_batches(
    file: _File, batches: Iterator[Any], column: str, number: int, first: int, read_bytes: Callable[[int], int]
) -> Iterator[Row]:
    """`number`: of the first row of the batches, from 0 on."""
    for batch in batches:
        start = max(0, first - number)
        for value in batch.column(column)[start:].to_pylist() if start < batch.num_rows else ():
            number_of_row = number + start + 1
            yield file.row(_text_at({column: value}, file.config.field), number_of_row, read_bytes(number_of_row))
            start += 1
        number += batch.num_rows


_READERS: dict[TextFormat, Callable[[_File, int], Iterator[Row]]] = {
    TextFormat.JSONL: _json_lines,
    TextFormat.CSV: _separated,
    TextFormat.PARQUET: _parquet,
    TextFormat.ARROW: _arrow,
}


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a pair in JSON, or bytes that were not UTF-8: `documents` replaces or refuses
        return text.encode(errors="surrogatepass")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_FIELDS} more" if len(names) > _SHOWN_FIELDS else ""
    return (", ".join(map(str, names[:_SHOWN_FIELDS])) or "none") + more
