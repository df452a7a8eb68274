"""The text of source files, document by document, from any position on.

Hidden here: what is binary, and where a large file is divided. A file of text is a document. A large one is divided at
line ends into pieces of at most PIECE_BYTES, each a document of its own; so a single large file also has a validation
split, and need not fit into memory. A row of a file that consists of rows is a document, whatever its length. The
documents are always the same, and those of a compressed file are those of the file. Called by `prepare`.
"""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, BinaryIO

from pydantic import Field

from shoal_workers.contract import Frozen
from shoal_workers.contract.text_data import BadRows, TextDataConfig, TextFormat
from shoal_workers.data.errors import BadRowError, UndecodableTextError
from shoal_workers.data.records import Fault, describe_kind, list_names, read_rows, value_at
from shoal_workers.data.sources import SourceFile

_WAY_OUT = "Set data.field to that of the text"
PIECE_BYTES = 256 * 1024
_SNIFF_BYTES = 8192
_SKIP_BYTES = 1 << 20
_FIRST = (0, False)
"""The place of a file's first byte, which may begin a byte order mark."""


class Position(Frozen):
    """A position between two documents of a corpus."""

    file: int = Field(0, ge=0)
    """Index of the source file."""
    offset: int = Field(0, ge=0)
    """Bytes of that file's text before this position; rows, if it consists of rows."""
    text_bytes: int = Field(0, ge=0)
    """Bytes of text of the whole corpus before this position; skipped binary files do not count."""
    read_bytes: int = Field(0, ge=0)
    """About how many bytes of all files have been read up to this position."""
    bad_rows: int = Field(0, ge=0)
    """Rows before this position that were left out."""


@dataclass(frozen=True, slots=True)
class Document:
    """Text that belongs to one split as a whole."""

    text: bytes
    """Valid UTF-8."""
    closes: bool
    """Nothing of the same text follows: the end of a file, or a row."""
    end: Position


def read_documents(sources: Sequence[SourceFile], start: Position, config: TextDataConfig) -> Iterator[Document]:
    """Yield documents from `start` on, up to the first that would exceed a total of `data.max_bytes`.

    Raises:
        MissingTextError: a file cannot be read.
        TextChangedError: a file is not as it was when it was listed.
        BadRowError: a row has no text in `data.field`, and `data.bad_rows` is "refuse".
        UndecodableTextError: not UTF-8, and `data.encoding_errors` is "strict".
    """
    used, bad_rows = start.text_bytes, start.bad_rows
    bytes_before = list(accumulate((source.num_bytes for source in sources), initial=0))
    for number in range(start.file, len(sources)):
        source = sources[number]
        first = start.offset if number == start.file else 0
        is_text = source.format is TextFormat.TEXT
        for part in _pieces(source, first) if is_text else _rows(source, config, first):
            if part.raw is None:
                bad_rows += 1
                continue
            used += len(part.raw)
            if config.max_bytes is not None and used > config.max_bytes:
                return
            file, offset = (number + 1, 0) if part.ends_file else (number, part.end)
            end = Position(
                file=file,
                offset=offset,
                text_bytes=used,
                read_bytes=bytes_before[number] + part.read_bytes,
                bad_rows=bad_rows,
            )
            text = _valid_utf8(part.raw, source, part.place, config)
            yield Document(text.removeprefix(BOM_UTF8) if part.place == _FIRST else text, part.closes, end)


@dataclass(frozen=True, slots=True)
class _Part:
    """What becomes one document."""

    raw: bytes | None
    """None for a row that is left out."""
    end: int
    """Position.offset of its end."""
    read_bytes: int
    closes: bool
    ends_file: bool

    @property
    def place(self) -> tuple[int, bool]:
        """Offset of its first byte, or number of the row; whether it is a row."""
        is_row = self.closes and not self.ends_file
        return (self.end, True) if is_row else (self.end - len(self.raw or b""), False)


def _pieces(source: SourceFile, start: int) -> Iterator[_Part]:
    """Yield the pieces of a text from `start` on; none of an empty or a skipped file."""
    with source.open() as (stream, read_bytes):
        offset, buffer = 0, b""
        if source.may_be_binary:
            buffer = _read(stream, _SNIFF_BYTES)
            if b"\0" in buffer:
                return
        if start:
            _skip(stream, start - len(buffer))
            offset, buffer = start, buffer[start:]
        while True:
            buffer += _read(stream, PIECE_BYTES + 1 - len(buffer))
            is_last = len(buffer) <= PIECE_BYTES
            piece = buffer if is_last else buffer[: _cut(buffer[:PIECE_BYTES])]
            buffer = buffer[len(piece) :]
            offset += len(piece)
            if piece:
                done = source.num_bytes if is_last else min(source.num_bytes, read_bytes())
                if source.compression is None:
                    done = offset
                yield _Part(piece, offset, done, closes=is_last, ends_file=is_last)
            if is_last:
                return


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    """Return fewer bytes only at the end."""
    return stream.read(num_bytes) if num_bytes > 0 else b""


def _skip(stream: BinaryIO, num_bytes: int) -> None:
    if num_bytes > 0 and stream.seekable():
        stream.seek(num_bytes, os.SEEK_CUR)
        return
    while num_bytes > 0 and (read := stream.read(min(num_bytes, _SKIP_BYTES))):
        num_bytes -= len(read)


def _cut(piece: bytes) -> int:
    """Return where to end a piece: after its last line end or, if it has none, before a character that would be
    split."""
    line_end = piece.rfind(b"\n") + 1
    if line_end:
        return line_end
    for back in range(1, min(4, len(piece))):
        if piece[-back] & 0xC0 == 0xC0:  # first byte of a character of several bytes
            return len(piece) - back
        if piece[-back] & 0x80 == 0:
            break
    return len(piece)


def _valid_utf8(raw: bytes, source: SourceFile, place: tuple[int, bool], config: TextDataConfig) -> bytes:
    try:
        raw.decode()
        return raw
    except UnicodeDecodeError as error:
        if config.encoding_errors == "replace":
            return raw.decode(errors="replace").encode()
        first, is_row = place
        where = f"row {first:,}, offset {error.start:,}" if is_row else f"offset {first + error.start:,}"
        raise UndecodableTextError(
            f"{source.location} is not UTF-8: byte 0x{raw[error.start]:02x} at {where} "
            f'({error.reason}). Convert the file, remove it from data.paths, or set data.encoding_errors: "replace".'
        ) from error


def _rows(source: SourceFile, config: TextDataConfig, first: int) -> Iterator[_Part]:
    """Rows from number `first` on, counted from 0, perhaps not UTF-8. Those without text are left out.

    Raises:
        BadRowError: a row has no text in the field, and `data.bad_rows` is "refuse"; or the file has no such column.
        MissingTextError: the file cannot be read, or is damaged.
    """
    check = partial(_refuse_column, source, config.field)
    for row in read_rows(source, (config.field,), _WAY_OUT, first, check):
        value = row.values if isinstance(row.values, Fault) else value_at(row.values, config.field, _WAY_OUT)
        if not isinstance(value, str | bytes | Fault):
            value = Fault(f"field {config.field!r} is {describe_kind(value)}, not text", _WAY_OUT)
        if isinstance(value, Fault) and config.bad_rows is not BadRows.SKIP:
            raise BadRowError(
                f'{row.place}: {value.reason}. {value.way_out}, or set data.bad_rows: "skip" to leave such rows out.'
            )
        text = None if isinstance(value, Fault) else _encoded(value) if isinstance(value, str) else value
        if text != b"":
            yield _Part(text, row.number, row.read_bytes, closes=True, ends_file=False)


def _refuse_column(source: SourceFile, field: str, schema: Any) -> None:
    """Raises BadRowError if no row can have text in the field."""
    import pyarrow.types as types

    first, *path = [field] if field in schema.names else field.split(".")
    dtype = schema.field(first).type
    for name in path:
        if types.is_struct(dtype) and dtype.get_field_index(name) >= 0:
            dtype = dtype.field(name).type
        elif (types.is_list(dtype) or types.is_large_list(dtype)) and name.isdecimal():
            dtype = dtype.value_type
        else:
            raise BadRowError(
                f"{source.location}: field {field!r} is missing: at {name!r} there is {dtype}. Set data.field to the "
                "path of the text."
            )
    kind = dtype.value_type if types.is_dictionary(dtype) else dtype
    is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary)
    if not any(test(kind) for test in is_text):
        columns = [f"{column.name} ({column.type})" for column in schema]
        raise BadRowError(
            f"{source.location}: field {field!r} is {dtype}, not text; the columns are {list_names(columns)}. Set "
            "data.field to the column of the text."
        )


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a pair in JSON, or bytes that were not UTF-8: `documents` replaces or refuses
        return text.encode(errors="surrogatepass")
