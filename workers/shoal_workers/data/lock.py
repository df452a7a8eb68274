"""A lock between the processes of one node. The kernel releases it when its holder ends, also by SIGKILL."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def node_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a file that is never deleted. `on_wait` is called once if another process holds it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
