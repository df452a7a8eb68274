"""The directories with the packages of `code.pip` on a node: who uses one, and which have not been used for long.

    KEY/             the packages; never changed after the rename that makes it
    KEY.use          each process that uses them holds a shared lock of it as long as it lives; its time is the last use
    KEY.lock         of the install, held together with that of KEY.use
    KEY.installing   an install that is not complete
    KEY.deleting     a removal that was interrupted

Hidden here: these files and their locks. Only the holder of the exclusive lock of KEY.use may remove files of KEY, that
one too: a process that has waited for the lock looks whether the file is still the one that it has locked. Never
removes what a process uses. Called by the engine, which installs packages, and for the service's retention in a process
on each node (`gateway/on_nodes.py`). Light: no torch, no Ray.
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

from shoal_workers.node_lock import has_locked, wait_for_lock

ROOT = "~/.cache/shoal/packages"
_KEY = re.compile(r"[0-9a-f]{32}|[A-Za-z0-9_-]{1,64}-[0-9a-f]{8}")
"""Name of a set of packages, or of a job's directory (`job_files/directory.py`), to which the same applies."""
_PARTS = ("", ".installing", ".deleting")
_FILES = (".json", ".lock", ".progress", ".use")
"""Endings in the order in which the files are removed: the lock that is held comes last."""


@dataclass(frozen=True, slots=True)
class PackageSet:
    """One directory of packages that no process uses."""

    name: str
    num_bytes: int
    unused_s: float
    """Seconds since its last use began."""


def root_of_node() -> Path:
    return Path(ROOT).expanduser()


def hold(root: Path, key: str, on_wait: Callable[[str], None]) -> IO[bytes]:
    """Notes that this process uses the set from now on, until the file is closed. Waits while it is being removed."""
    path = root / f"{key}.use"
    while True:
        file = path.open("ab")
        wait_for_lock(file, fcntl.LOCK_SH, path, on_wait)
        if _is_still_there(file, path):
            os.utime(path)
            return file
        file.close()


def unused(root: Path, *, for_s: float) -> list[PackageSet]:
    """Sets that no process uses, nor has used in the last `for_s` seconds; the longest unused first."""
    sets = []
    for key in sorted({path.name.partition(".")[0] for path in _entries(root)}):
        with _alone(root, key) as is_alone:
            package_set = _look(root, key)
            if is_alone and package_set is not None and package_set.unused_s >= for_s:
                sets.append(package_set)
    return sorted(sets, key=lambda package_set: -package_set.unused_s)


def remove(root: Path, key: str, *, for_s: float) -> bool:
    """Returns False if a process uses it, or has used it meanwhile. Raises ValueError: `key` is not a valid name of a
    set."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key[:80]!r} is not a valid name of a set of packages")
    with _alone(root, key) as is_alone:
        package_set = _look(root, key)
        if not is_alone or package_set is None or package_set.unused_s < for_s:
            return False
        directory, doomed = root / key, root / f"{key}.deleting"
        shutil.rmtree(doomed, ignore_errors=True)
        with suppress(FileNotFoundError):
            directory.rename(doomed)  # at once: what a process may find is whole or gone
        for part in _PARTS:
            shutil.rmtree(root / f"{key}{part}", ignore_errors=True)
        for suffix in _FILES:
            (root / f"{key}{suffix}").unlink(missing_ok=True)
    return True


@contextmanager
def _alone(root: Path, key: str) -> Iterator[bool]:
    """Return whether no other process uses the set, nor can begin to until the end of the block."""
    path = root / f"{key}.use"
    was_there, last_use = path.exists(), _last_use(root, key)
    with path.open("ab") as file:
        is_alone = has_locked(file, fcntl.LOCK_EX) and _is_still_there(file, path)
        if is_alone and not was_there and last_use is not None:
            os.utime(path, (last_use, last_use))  # to look is no use
        yield is_alone


def _look(root: Path, key: str) -> PackageSet | None:
    last_use = _last_use(root, key)
    if last_use is None:
        return None
    num_bytes = 0
    for part in _PARTS:
        for directory, _, names in os.walk(root / f"{key}{part}"):
            for name in names:
                with suppress(OSError):
                    num_bytes += (Path(directory) / name).lstat().st_size
    return PackageSet(key, num_bytes, max(0.0, time.time() - last_use))


def _last_use(root: Path, key: str) -> float | None:
    """Returns None if there is no set."""
    # a set of an earlier release has no file for it: then the time of its install counts
    for name in (f"{key}.use", key, *(f"{key}{part}" for part in _PARTS[1:])):
        with suppress(FileNotFoundError):
            return (root / name).stat().st_mtime
    return None


def _entries(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if _KEY.fullmatch(path.name.partition(".")[0])]
    except FileNotFoundError:
        return []


def _is_still_there(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
