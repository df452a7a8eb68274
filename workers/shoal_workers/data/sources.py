"""Finds the files that a TextDataConfig names, and opens them: local or remote.

Hidden here: which files a path, a glob, a directory or a URL means, in an order that is the same on every node with the
same files; which format and compression follow from a file's name; how a remote file is read.
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
from shoal_workers.data.remote import BLOCK_BYTES, RemoteFile, is_url, list_remote

_STDLIB_SUFFIXES = (".py", ".pyi", ".txt")
_STDLIB_SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
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
_SEEKABLE = frozenset({TextFormat.PARQUET, TextFormat.ARROW})
"""Formats with a table of contents. They are compressed inside."""
_SMALL_BLOCK_BYTES = 1 << 20
_FILE_URL = "file://"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of text or rows, as it was when it was listed."""

    location: str
    """Absolute path, or URL."""
    num_bytes: int
    version: int | str
    """Time of its last change in nanoseconds; for a URL, the version that its store reports."""
    may_be_binary: bool
    """True if it was found in a directory: a binary file is then skipped. A file that the user named is always read."""
    format: TextFormat
    name: str
    """Name before links are followed: it decides the format."""

    @property
    def compression(self) -> str | None:
        return _COMPRESSIONS.get(_find_suffix(self.name)) if self.format not in _SEEKABLE else None

    @property
    def is_tab_separated(self) -> bool:
        return _find_suffix(_strip_compression(self.name)) == ".tsv"

    @contextmanager
    def open(self) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
        """Open the content without compression, with a function that counts the bytes of the file that were read.

        Raises:
            MissingTextError: the file cannot be read, or is damaged.
            TextChangedError: the file has changed since it was listed.
        """
        try:
            with self._open_raw() as raw:
                if self.compression is not None and not self.num_bytes:
                    raise OSError(f"it is empty, so it is not {self.compression}")
                content = raw if self.compression is None else _decompress(raw, self.compression)
                yield cast(BinaryIO, io.BufferedReader(content, _SMALL_BLOCK_BYTES)), raw.tell
        except FileNotFoundError as error:
            raise MissingTextError(f"{self.location} cannot be read: it does not exist any more.") from error
        except OSError as error:
            raise MissingTextError(f"{self.location} cannot be read: {error.strerror or error}.") from error

    @contextmanager
    def _open_raw(self) -> Iterator[io.RawIOBase]:
        if is_url(self.location):
            ahead_bytes = 0 if self.format in _SEEKABLE else BLOCK_BYTES - _SMALL_BLOCK_BYTES
            with RemoteFile(self.location, self.num_bytes, ahead_bytes) as remote:
                yield remote
            return
        with Path(self.location).open("rb", buffering=0) as file:
            self._raise_if_changed(os.fstat(file.fileno()))
            yield file
            self._raise_if_changed(os.fstat(file.fileno()))

    def _raise_if_changed(self, status: os.stat_result) -> None:
        if (status.st_size, status.st_mtime_ns) != (self.num_bytes, self.version):
            raise TextChangedError(
                f"{self.location} changed while it was read (it had {self.num_bytes:,} bytes). "
                "Prepare the data again when the file no longer changes."
            )


def _decompress(raw: io.RawIOBase, compression: str) -> Any:
    """Return a stream of the content. Reading it raises OSError if the file is damaged or ends early."""
    import pyarrow  # slow to import, and its allocator starts a thread

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), compression)


def find_sources(config: TextDataConfig) -> list[SourceFile]:
    """Return every file once, in the order of `data.paths` and by name below each of them.

    Raises:
        MissingTextError: an entry of data.paths names no file.
    """
    sources: dict[str, SourceFile] = {}
    for source in _list_sources(config):
        sources.setdefault(source.location, source)
    return list(sources.values())


def _list_sources(config: TextDataConfig) -> Iterator[SourceFile]:
    if config.corpus is not None:
        for path in _walk(Path(sysconfig.get_paths()["stdlib"]), skipped=_STDLIB_SKIPPED):
            if path.suffix in _STDLIB_SUFFIXES:
                yield make_local_source(path, configured=TextFormat.TEXT)
    for entry in config.paths:
        is_remote = is_url(entry) and not entry.startswith(_FILE_URL)
        yield from (_list_remote if is_remote else _list_local)(entry, config.format)


def choose_format(name: str, configured: TextFormat) -> TextFormat:
    """Return `data.format`, or the format of a file with this name if it is AUTO."""
    if configured is not TextFormat.AUTO:
        return configured
    return _FORMATS.get(_find_suffix(_strip_compression(name)), TextFormat.TEXT)


def _find_suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _strip_compression(name: str) -> str:
    return name[: -len(_find_suffix(name))] if _find_suffix(name) in _COMPRESSIONS else name


def make_local_source(
    path: Path, *, may_be_binary: bool = False, configured: TextFormat = TextFormat.AUTO
) -> SourceFile:
    """Describe a file as it is now. Raises MissingTextError if it does not exist."""
    try:
        real = path.resolve()
        stat = real.stat()
    except OSError as error:
        raise MissingTextError(f"{path} cannot be read: {error.strerror}.") from error
    file_format = choose_format(path.name, configured)
    return SourceFile(str(real), stat.st_size, stat.st_mtime_ns, may_be_binary, file_format, path.name)


def _list_remote(entry: str, configured: TextFormat) -> list[SourceFile]:
    """List the files of a URL in data.paths."""
    sources = []
    for remote in list_remote(entry):
        name = _strip_query(remote.url).rpartition("/")[2]
        file_format = choose_format(name, configured)
        sources.append(SourceFile(remote.url, remote.num_bytes, remote.version, remote.was_walked, file_format, name))
    if not sources:
        raise MissingTextError(f"data.paths {entry!r} names no file. Every node that runs a worker must reach it.")
    return sources


def _strip_query(url: str) -> str:
    return url.partition("?")[0] if url.startswith("http") else url


def _list_local(entry: str, configured: TextFormat) -> list[SourceFile]:
    """List the files of a path, a glob or a directory in data.paths."""
    pattern = os.path.expanduser(entry.removeprefix(_FILE_URL))  # noqa: PTH111 - Path would change the pattern
    try:
        plain = Path(pattern).exists()
        matches = [pattern] if plain else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute patterns
    except (OSError, ValueError) as error:  # the name is too long, or contains a null byte
        raise MissingTextError(f"data.paths {entry!r} is not a path: {error}.") from error
    sources = []
    for match in map(Path, matches):
        if match.is_dir():
            for path in _walk(match, skipped=frozenset({"__pycache__"})):
                sources.append(make_local_source(path, may_be_binary=True, configured=configured))
        elif match.is_file():
            sources.append(make_local_source(match, configured=configured))
    if not sources:
        raise MissingTextError(_describe_missing(entry, exists=bool(matches)))
    return sources


def _describe_missing(entry: str, *, exists: bool) -> str:
    if exists:
        return f"data.paths {entry!r} exists but contains no file. Put text files into it, or name another directory."
    here = "" if Path(entry).is_absolute() else f" (relative to {Path.cwd()})"
    every_node = "Every node that runs a worker must have the files under this path."
    return f"data.paths {entry!r}{here} matches no file. {every_node}"


def _walk(root: Path, *, skipped: frozenset[str]) -> Iterator[Path]:
    """Yield the regular files below `root` by name, without hidden ones. Links to directories are not followed."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith(".") and name not in skipped)
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path
