"""The sets of packages of `code.pip` on a node, one directory each: which are in use, and the removal of old ones.

    KEY/             the packages; never changed after the rename that makes it
    KEY.use          each process that uses the set holds a shared lock of this file until it ends; the modification
                     time is that of the last use
    KEY.lock         lock of the install, held together with that of KEY.use
    KEY.installing   an install that is not complete
    KEY.deleting     a removal that was interrupted

Hidden here: these files and their locks. Only the holder of the exclusive lock of KEY.use may remove the files of KEY,
KEY.use included, so a process that has waited for the lock checks whether the path still leads to the file that it has
locked. A set that a process uses is never removed. The engine calls this module to install, and the service's retention
on each node (`gateway/ray_cluster.py`). It imports neither torch nor Ray.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal_workers.descriptors import is_at, try_lock
from shoal_workers.node_lock import wait_for_lock

ROOT = "~/.cache/shoal/packages"
_KEY = re.compile(r"[0-9a-f]{32}|[A-Za-z0-9_-]{1,64}-[0-9a-f]{8}")
"""Name of a set of packages, or of a job's directory (`job_files/directory.py`), which has the same files."""
_DIRECTORIES = ("", ".installing", ".deleting")
_FILES = (".json", ".lock", ".progress", ".use")
"""Suffixes in the order of removal. The file whose lock is held comes last."""


@dataclass(frozen=True, slots=True)
class PackageSet:
    """A set of packages that no process uses."""

    name: str
    num_bytes: int
    unused_s: float
    """Seconds since its last use began."""


def root_of_node() -> Path:
    return Path(ROOT).expanduser()


def hold(root: Path, key: str, on_wait: Callable[[str], None]) -> IO[bytes]:
    """Mark the set as used by this process until the returned file is closed. Waits while it is being removed."""
    path = root / f"{key}.use"
    while True:
        file = path.open("ab")
        wait_for_lock(file, fcntl.LOCK_SH, path, on_wait)
        if is_at(file.fileno(), path):
            os.utime(path)
            return file
        file.close()


def unused(root: Path, *, for_s: float) -> list[PackageSet]:
    """Return the sets that no process has used in the last `for_s` seconds, the longest unused first."""
    sets = []
    for key in sorted({path.name.partition(".")[0] for path in _entries(root)}):
        with _try_exclusive(root, key) as is_exclusive:
            package_set = _measure(root, key)
            if is_exclusive and package_set is not None and package_set.unused_s >= for_s:
                sets.append(package_set)
    return sorted(sets, key=lambda package_set: -package_set.unused_s)


def remove(root: Path, key: str, *, for_s: float) -> bool:
    """Remove a set. Return False if a process has used it in the last `for_s` seconds.

    Raises:
        ValueError: `key` is not a valid name of a set.
    """
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key[:80]!r} is not a valid name of a set of packages")
    with _try_exclusive(root, key) as is_exclusive:
        package_set = _measure(root, key)
        if not is_exclusive or package_set is None or package_set.unused_s < for_s:
            return False
        directory, deleting = root / key, root / f"{key}.deleting"
        shutil.rmtree(deleting, ignore_errors=True)
        with suppress(FileNotFoundError):
            directory.rename(deleting)  # atomic: other processes see the whole set or none
        for suffix in _DIRECTORIES:
            shutil.rmtree(root / f"{key}{suffix}", ignore_errors=True)
        for suffix in _FILES:
            (root / f"{key}{suffix}").unlink(missing_ok=True)
    return True


def _entries(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if _KEY.fullmatch(path.name.partition(".")[0])]
    except FileNotFoundError:
        return []


@contextmanager
def _try_exclusive(root: Path, key: str) -> Iterator[bool]:
    """Yield True if no other process uses the set, nor can begin to use it before the block ends."""
    path = root / f"{key}.use"
    was_there, last_use = path.exists(), _last_use(root, key)
    with path.open("ab") as file:
        is_exclusive = try_lock(file.fileno()) and is_at(file.fileno(), path)
        if is_exclusive and not was_there and last_use is not None:
            os.utime(path, (last_use, last_use))  # opening the file is not a use of the set
        yield is_exclusive


def _measure(root: Path, key: str) -> PackageSet | None:
    last_use = _last_use(root, key)
    if last_use is None:
        return None
    num_bytes = 0
    for suffix in _DIRECTORIES:
        for directory, _, names in os.walk(root / f"{key}{suffix}"):
            for name in names:
                with suppress(OSError):
                    num_bytes += (Path(directory) / name).lstat().st_size
    return PackageSet(key, num_bytes, max(0.0, time.time() - last_use))


def _last_use(root: Path, key: str) -> float | None:
    """Return the time of the last use; None if there is no set."""
    # without KEY.use (a set of an earlier release) the time of the install counts
    for name in (f"{key}.use", key, *(f"{key}{suffix}" for suffix in _DIRECTORIES[1:])):
        with suppress(FileNotFoundError):
            return (root / name).stat().st_mtime
    return None
