"""A lock among the processes of one node. The kernel frees it when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def node_lock(path: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file that is never deleted; `waits` is called once if another process holds it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
