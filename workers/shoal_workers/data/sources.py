"""The files that a TextDataConfig names, and how each is opened: local paths, globs and directories, and URLs.

Hidden here: which files an entry means, in an order that is the same on every node with the same files; what a file's
name says about its format and its compression; that a file may be far away. Called by `prepare` and `documents`.
"""

from __future__ import annotations

import glob
import io
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from shoal_workers.contract.text_data import TextDataConfig, TextFormat
from shoal_workers.data.errors import MissingTextError, TextChangedError
from shoal_workers.data.remote import BLOCK_BYTES, is_url, list_remote, open_remote

_STDLIB_SUFFIXES = (".py", ".pyi", ".txt")
_STDLIB_LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Directories that are skipped at any depth: installed packages, and tests (half of the text, of little use)."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_FORMATS = {
    ".jsonl": TextFormat.JSONL,
    ".ndjson": TextFormat.JSONL,
    ".parquet": TextFormat.PARQUET,
    ".arrow": TextFormat.ARROW,
    ".feather": TextFormat.ARROW,
    ".csv": TextFormat.CSV,
    ".tsv": TextFormat.CSV,
}
_READ_ANYWHERE = frozenset({TextFormat.PARQUET, TextFormat.ARROW})
"""Formats with a table of contents, which have their own compression inside."""
_SMALL_BLOCK_BYTES = 1 << 20
_FILE_URL = "file://"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, as it was when it was listed."""

    place: str
    """Absolute path, or URL."""
    num_bytes: int
    version: int | str
    """Time of its last change in nanoseconds; of a URL: what its store says of its version."""
    may_be_binary: bool
    """Found by walking a directory, so a binary file is skipped; a file that the user named is always read."""
    format: TextFormat
    name: str
    """As it was named: a link may lead to a file whose name says nothing."""

    @property
    def compression(self) -> str | None:
        return _COMPRESSIONS.get(_suffix(self.name)) if self.format not in _READ_ANYWHERE else None

    @property
    def is_tab_separated(self) -> bool:
        return _suffix(_without_compression(self.name)) == ".tsv"

    @contextmanager
    def opened(self) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
        """Its content without compression, and how many bytes of the file have been read.

        Raises:
            MissingTextError: it cannot be read, or is damaged.
            TextChangedError: it is not as it was listed.
        """
        try:
            with self._raw() as raw:
                if self.compression is None:
                    yield cast(BinaryIO, io.BufferedReader(raw, _SMALL_BLOCK_BYTES)), raw.tell
                else:
                    if not self.num_bytes:
                        raise OSError(f"it is empty, so it is not {self.compression}")
                    stream = _Decompressed(raw, self.compression)
                    yield cast(BinaryIO, io.BufferedReader(stream, _SMALL_BLOCK_BYTES)), raw.tell
        except FileNotFoundError as error:
            raise MissingTextError(f"{self.place} cannot be read: it does not exist any more.") from error
        except OSError as error:
            raise MissingTextError(f"{self.place} cannot be read: {error.strerror or error}.") from error

    @contextmanager
    def _raw(self) -> Iterator[io.RawIOBase]:
        if is_url(self.place):
            block_bytes = _SMALL_BLOCK_BYTES if self.format in _READ_ANYWHERE else BLOCK_BYTES
            with open_remote(self.place, self.num_bytes, block_bytes=block_bytes) as remote:
                yield remote
            return
        with Path(self.place).open("rb", buffering=0) as file:
            self._check(os.fstat(file.fileno()))
            yield file
            self._check(os.fstat(file.fileno()))

    def _check(self, now: os.stat_result) -> None:
        if (now.st_size, now.st_mtime_ns) != (self.num_bytes, self.version):
            raise TextChangedError(
                f"{self.place} changed while it was read (it had {self.num_bytes:,} bytes). "
                "Prepare the data again when the file no longer changes."
            )


class _Decompressed(io.RawIOBase):
    """What a compressed stream contains. OSError if it is damaged or ends early."""

    def __init__(self, raw: io.RawIOBase, compression: str) -> None:
        super().__init__()
        import pyarrow  # slow to import, and its allocator starts a thread

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def find_sources(config: TextDataConfig) -> list[SourceFile]:
    """Returns every file once, in the order of `data.paths` and by name below each of them.

    Raises:
        MissingTextError: an entry of data.paths names no file.
    """
    sources: dict[str, SourceFile] = {}
    if config.corpus is not None:
        for path in _stdlib_files(Path(sysconfig.get_paths()["stdlib"])):
            source = local_source(path, may_be_binary=False, chosen=TextFormat.TEXT)
            sources.setdefault(source.place, source)
    for entry in config.paths:
        for source in _named(entry, config.format):
            sources.setdefault(source.place, source)
    return list(sources.values())


def format_of(name: str, chosen: TextFormat) -> TextFormat:
    """The format of a file with this name. `chosen`: what `data.format` says."""
    if chosen is not TextFormat.AUTO:
        return chosen
    return _FORMATS.get(_suffix(_without_compression(name)), TextFormat.TEXT)


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _without_compression(name: str) -> str:
    return name[: -len(_suffix(name))] if _suffix(name) in _COMPRESSIONS else name


def local_source(path: Path, *, may_be_binary: bool = False, chosen: TextFormat = TextFormat.AUTO) -> SourceFile:
    """Raises MissingTextError if the file does not exist."""
    try:
        real = path.resolve()
        stat = real.stat()
    except OSError as error:
        raise MissingTextError(f"{path} cannot be read: {error.strerror}.") from error
    form = format_of(path.name, chosen)
    return SourceFile(str(real), stat.st_size, stat.st_mtime_ns, may_be_binary, form, path.name)


def _stdlib_files(root: Path) -> Iterator[Path]:
    for path in _walk(root, left_out=_STDLIB_LEFT_OUT):
        if path.suffix in _STDLIB_SUFFIXES:
            yield path


def _named(entry: str, chosen: TextFormat) -> Iterator[SourceFile]:
    """The files of one entry of data.paths."""
    if is_url(entry) and not entry.startswith(_FILE_URL):
        remote = list_remote(entry)
        for remote_file in remote:
            name = _without_query(remote_file.url).rpartition("/")[2]
            form = format_of(name, chosen)
            yield SourceFile(
                remote_file.url, remote_file.num_bytes, remote_file.version, remote_file.was_walked, form, name
            )
        if not remote:
            raise MissingTextError(f"data.paths {entry!r} names no file. Every node that runs a worker must reach it.")
        return
    for path, walked in _named_locally(entry):
        yield local_source(path, may_be_binary=walked, chosen=chosen)


def _without_query(url: str) -> str:
    return url.partition("?")[0] if url.startswith("http") else url


def _named_locally(entry: str) -> Iterator[tuple[Path, bool]]:
    """The files of one entry, and whether they were found by walking a directory."""
    pattern = os.path.expanduser(entry.removeprefix(_FILE_URL))  # noqa: PTH111 - Path would change the pattern
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
    every_node = "Every node that runs a worker must have the files under this path."
    return f"data.paths {entry!r}{here} matches no file. {every_node}"


def _walk(root: Path, *, left_out: frozenset[str]) -> Iterator[Path]:
    """Regular files below `root`, sorted by name, without hidden ones; links to directories are not followed."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in left_out)
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path
