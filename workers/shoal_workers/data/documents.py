"""The text that a TextDataConfig names, document by document, from any position on, and the errors of text data.

Hidden here: which files an entry of `data.paths` means, in an order that is the same on every node with the same files;
what is binary; where a large file is divided. A document is a file. A large file is divided at line ends into pieces of
at most PIECE_BYTES, each a document of its own; so a single large file also has a validation split, and need not fit
into memory. The documents are always the same. Called by `prepare`.

DataError(ValueError)    with a message for the user who configured the data
  MissingTextError       an entry of data.paths names no readable file
  EmptyCorpusError       the files contain no text
  CorpusTooSmallError    less training text than one sample
  UndecodableTextError   not UTF-8, with data.encoding_errors "strict"
  TextChangedError       a file changed while it was read
  TokenizerError         data.tokenizer cannot be loaded
  CacheError             data.cache_dir cannot be written
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.model import TextDataConfig

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
    """Returns where to end a piece: after its last line end or, if it has none, before a character that would be
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


_STDLIB_SUFFIXES = (".py", ".pyi", ".txt")
_STDLIB_LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Directories that are skipped at any depth: installed packages, and tests (half of the text, of little use)."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, as it was when it was listed."""

    path: Path
    num_bytes: int
    mtime_ns: int
    may_be_binary: bool
    """Found by walking a directory, so a binary file is skipped; a file that the user named is always read."""


def find_sources(config: TextDataConfig) -> list[SourceFile]:
    """Returns every file once, in the order of `data.paths` and by name below each of them.

    Raises:
        MissingTextError: an entry of data.paths names no file.
    """
    found: dict[Path, SourceFile] = {}
    if config.corpus is not None:
        for path in _stdlib_files(Path(sysconfig.get_paths()["stdlib"])):
            _add(found, path, may_be_binary=False)
    for entry in config.paths:
        for path, walked in _named(entry):
            _add(found, path, may_be_binary=walked)
    return list(found.values())


def _add(found: dict[Path, SourceFile], path: Path, *, may_be_binary: bool) -> None:
    try:
        path = path.resolve()
        stat = path.stat()
    except OSError as error:
        raise MissingTextError(f"{path} cannot be read: {error.strerror}.") from error
    found.setdefault(path, SourceFile(path, stat.st_size, stat.st_mtime_ns, may_be_binary))


def _stdlib_files(root: Path) -> Iterator[Path]:
    for path in _walk(root, left_out=_STDLIB_LEFT_OUT):
        if path.suffix in _STDLIB_SUFFIXES:
            yield path


def _named(entry: str) -> Iterator[tuple[Path, bool]]:
    """The files of one entry of data.paths, and whether they were found by walking a directory."""
    pattern = os.path.expanduser(entry)  # noqa: PTH111 - Path would change the pattern
    try:
        plain = Path(pattern).exists()
        matches = [pattern] if plain else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute patterns
    except (OSError, ValueError) as error:  # the name is too long, or contains a null byte
        raise MissingTextError(f"data.paths {entry!r} is not a path: {error}.") from error
    num_files = 0
    for match in map(Path, matches):
        if match.is_dir():
            for path in _walk(match, left_out=frozenset({"__pycache__"})):
                num_files += 1
                yield path, True
        elif match.is_file():
            num_files += 1
            yield match, False
    if not num_files:
        raise MissingTextError(_nothing_there(entry, bool(matches)))


def _nothing_there(entry: str, matched: bool) -> str:
    if matched:
        return f"data.paths {entry!r} exists but contains no file. Put text files into it, or name another directory."
    here = "" if Path(entry).is_absolute() else f" (relative to {Path.cwd()})"
    kind = "is a URL, but text is read from file system paths only" if "://" in entry else "matches no file"
    return f"data.paths {entry!r}{here} {kind}. Every node that runs a worker must have the files under this path."


def _walk(root: Path, *, left_out: frozenset[str]) -> Iterator[Path]:
    """Regular files below `root`, sorted by name, without hidden ones; links to directories are not followed."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in left_out)
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path


class DataError(ValueError):
    """Root of all errors about text data; `code` is stable."""

    code = "data"


class MissingTextError(DataError):
    code = "data_missing_text"


class EmptyCorpusError(DataError):
    code = "data_empty_corpus"


class CorpusTooSmallError(DataError):
    code = "data_corpus_too_small"


class UndecodableTextError(DataError):
    code = "data_undecodable_text"


class TextChangedError(DataError):
    code = "data_text_changed"


class TokenizerError(DataError):
    code = "data_tokenizer"


class CacheError(DataError):
    code = "data_cache"
