"""The text of the source files, document by document, from any position on. The documents are always the same.

A document is a file. A large file is divided at line ends into pieces of at most PIECE_BYTES, each a document of its
own; so a single large file also has a validation split, and need not fit into memory. Called by `prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.data.errors import MissingTextError, TextChangedError, UndecodableTextError
from shoal_workers.data.sources import SourceFile

PIECE_BYTES = 256 * 1024
_SNIFF_BYTES = 8192


class Position(Frozen):
    """A position between two documents of a corpus."""

    file: int = Field(0, ge=0)
    """Index of the source file."""
    offset: int = Field(0, ge=0)
    """Bytes of that file before this position."""
    text_bytes: int = Field(0, ge=0)
    """Bytes of text of the whole corpus before this position; skipped binary files do not count."""


@dataclass(frozen=True, slots=True)
class Document:
    """Text that belongs to one split as a whole."""

    text: bytes
    """Valid UTF-8."""
    ends_file: bool
    end: Position


def read_documents(
    sources: Sequence[SourceFile],
    start: Position,
    *,
    max_bytes: int | None = None,
    encoding_errors: Literal["strict", "replace"] = "replace",
) -> Iterator[Document]:
    """Documents from `start` on; stops before the first one that would exceed a total of `max_bytes`.

    Raises:
        MissingTextError: a file cannot be read.
        TextChangedError: a file is longer or shorter than when it was listed.
        UndecodableTextError: not UTF-8, and encoding_errors is "strict".
    """
    used = start.text_bytes
    for number in range(start.file, len(sources)):
        source = sources[number]
        first = start.offset if number == start.file else 0
        for raw, end_offset in _pieces(source, first):
            used += len(raw)
            if max_bytes is not None and used > max_bytes:
                return
            ends_file = end_offset == source.num_bytes
            place = (number + 1, 0) if ends_file else (number, end_offset)
            end = Position(file=place[0], offset=place[1], text_bytes=used)
            text = _valid_utf8(raw, source, end_offset - len(raw), encoding_errors)
            yield Document(text, ends_file, end)


def _pieces(source: SourceFile, start: int) -> Iterator[tuple[bytes, int]]:
    """(bytes, offset of their end) from `start` to the end of a file; nothing for an empty or a skipped file."""
    try:
        with source.path.open("rb") as file:
            if source.may_be_binary and b"\0" in file.read(_SNIFF_BYTES):
                return
            offset = file.seek(start)
            while offset < source.num_bytes:
                piece = file.read(PIECE_BYTES)
                if not piece:
                    raise TextChangedError(_changed(source))
                if offset + len(piece) < source.num_bytes:
                    piece = piece[: _cut(piece)]
                    file.seek(offset + len(piece))
                offset += len(piece)
                if offset > source.num_bytes:
                    raise TextChangedError(_changed(source))
                yield piece, offset
            if offset == source.num_bytes and file.read(1):
                raise TextChangedError(_changed(source))
    except OSError as error:
        raise MissingTextError(f"{source.path} cannot be read: {error.strerror or error}.") from error


def _cut(piece: bytes) -> int:
    """Where to end a piece: after its last line end; without one, before a character that it would split."""
    line_end = piece.rfind(b"\n") + 1
    if line_end:
        return line_end
    for back in range(1, min(4, len(piece))):
        if piece[-back] & 0xC0 == 0xC0:  # first byte of a character of several bytes
            return len(piece) - back
        if piece[-back] & 0x80 == 0:
            break
    return len(piece)


def _valid_utf8(raw: bytes, source: SourceFile, offset: int, errors: Literal["strict", "replace"]) -> bytes:
    try:
        raw.decode()
        return raw
    except UnicodeDecodeError as error:
        if errors == "replace":
            return raw.decode(errors="replace").encode()
        raise UndecodableTextError(
            f"{source.path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset + error.start:,} "
            f'({error.reason}). Convert the file, remove it from data.paths, or set data.encoding_errors: "replace".'
        ) from error


def _changed(source: SourceFile) -> str:
    return (
        f"{source.path} changed while it was read (it had {source.num_bytes:,} bytes). "
        "Prepare the data again when the file no longer changes."
    )
