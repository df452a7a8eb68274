"""Storage that is away, storage that hangs, and a database that another process has locked."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def absent(directory: Path) -> Iterator[None]:
    """A file replaces the directory."""
    aside = directory.with_name(f"{directory.name}-aside")
    directory.mkdir(exist_ok=True)
    directory.rename(aside)
    directory.touch()
    try:
        yield
    finally:
        directory.unlink()
        aside.rename(directory)


@contextmanager
def hanging(path: Path, *, patience_s: float) -> Iterator[None]:
    """A named pipe in place of a file blocks every process that opens it to write. On leaving, the writer returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    try:
        yield
    finally:
        # The reader's side lets the writer in; a pipe cannot be synced, so the writer gets an error and removes it.
        descriptor = os.open(path, os.O_RDONLY)
        while os.read(descriptor, 1 << 16):
            pass
        os.close(descriptor)
        deadline = time.monotonic() + patience_s
        while path.exists():
            assert time.monotonic() < deadline, f"the writer of {path.name} has not returned within {patience_s:g} s"
            time.sleep(0.02)


@contextmanager
def locked(database: Path) -> Iterator[None]:
    """The write lock of an SQLite database is held."""
    connection = sqlite3.connect(database, timeout=30.0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")
    finally:
        connection.close()
