"""Descriptors of open files: closed after a block, locked, and synced.

For modules that open files themselves, because a path would not be enough: another process may replace what is at it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def close_after(descriptor: int) -> Iterator[int]:
    """Close the descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Return whether this process now has the lock (LOCK_EX or LOCK_SH) of the open file. Does not wait."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file still has this path: it was neither removed nor replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def sync_path(path: Path) -> None:
    """Make a file's content, or a directory's names, survive a power failure."""
    with close_after(os.open(path, os.O_RDONLY)) as descriptor:
        os.fsync(descriptor)
