"""The files that a TextDataConfig names, in an order that is the same on every node with the same files.

It lists directories, and does not open the files. Called by `prepare`.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal_workers.contract.model.lm import TextDataConfig
from shoal_workers.data.errors import MissingTextError

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
    """Every file once, in the order of `data.paths` and by name below each of them.

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
