"""Text in files that consist of rows: JSON lines, Parquet, Arrow, CSV. Each row is one document.

    source, data.field  ->  TextRow(text, end, read_bytes)  in the order of the file, from any row on

`records` reads the files. Hidden here: which values and which columns are text, and what is said about a row without
text. Called by `documents`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal_workers.contract.text_data import BadRows, TextDataConfig
from shoal_workers.data.errors import BadRowError
from shoal_workers.data.records import Fault, kind_of, listed, read_rows, value_at
from shoal_workers.data.sources import SourceFile

_WAY_OUT = "Set data.field to that of the text"


@dataclass(frozen=True, slots=True)
class TextRow:
    text: bytes | None
    """As in the file, perhaps not UTF-8; None: a bad row that is left out."""
    end: int
    """Rows of the file up to this one."""
    read_bytes: int
    """Bytes of the file that have been read, for the progress."""


def rows_of(source: SourceFile, config: TextDataConfig, first: int) -> Iterator[TextRow]:
    """Rows from number `first` on, counted from 0. Lines without content are left out.

    Raises:
        BadRowError: a row has no text in the field, and `data.bad_rows` is "refuse"; or the file has no such column.
        MissingTextError: the file cannot be read, or is damaged.
    """
    check = partial(_refuse_column, source, config.field)
    for row in read_rows(source, (config.field,), _WAY_OUT, first, check):
        value = row.values if isinstance(row.values, Fault) else value_at(row.values, config.field, _WAY_OUT)
        if not isinstance(value, str | bytes | Fault):
            value = Fault(f"field {config.field!r} is {kind_of(value)}, not text", _WAY_OUT)
        if not isinstance(value, Fault):
            yield TextRow(_encoded(value) if isinstance(value, str) else value, row.number, row.read_bytes)
        elif config.bad_rows is BadRows.SKIP:
            yield TextRow(None, row.number, row.read_bytes)
        else:
            raise BadRowError(
                f'{row.place}: {value.reason}. {value.way_out}, or set data.bad_rows: "skip" to leave such rows out.'
            )


def _refuse_column(source: SourceFile, field: str, schema: Any) -> None:
    """Raises BadRowError if no row can have text in the field."""
    import pyarrow.types as types

    first, *path = [field] if field in schema.names else field.split(".")
    found = schema.field(first).type
    for name in path:
        if types.is_struct(found) and found.get_field_index(name) >= 0:
            found = found.field(name).type
        elif (types.is_list(found) or types.is_large_list(found)) and name.isdecimal():
            found = found.value_type
        else:
            raise BadRowError(
                f"{source.place}: field {field!r} is missing: at {name!r} there is {found}. Set data.field to the path "
                "of the text."
            )
    kind = found.value_type if types.is_dictionary(found) else found
    is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    if not any(test(kind) for test in is_text):
        columns = [f"{one.name} ({one.type})" for one in schema]
        raise BadRowError(
            f"{source.place}: field {field!r} is {found}, not text; the columns are {listed(columns)}. Set data.field "
            "to the column of the text."
        )


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a pair in JSON, or bytes that were not UTF-8: `documents` replaces or refuses
        return text.encode(errors="surrogatepass")
