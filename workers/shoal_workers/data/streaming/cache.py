"""Whole shards on the local disk, shared by all processes of a node and never more than a given number of bytes.

    <directory>/cache.lock               held (flock) for milliseconds, to make room or to make a part whole
                part-<digest>-<name>     is being fetched; has its final length from the begin; locked by its process
                shard-<digest>-<name>    whole; locked (shared) by each process that reads it

The kernel releases the locks of a process that is killed, so what it left is seen at once: the next process that makes
room deletes a part without a lock. A shard that is in use is never deleted; of the others the one that was not used for
the longest time goes first. A part becomes whole by a rename after an fsync.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shoal_workers.data.errors import CacheError
from shoal_workers.descriptors import try_lock

_LOCK = "cache.lock"
_PART, _WHOLE = "part-", "shard-"
_NAME_LETTERS = 100


class NoClaim(StrEnum):
    """Why a shard is not to be fetched by this process now."""

    PRESENT = "present"
    FETCHED_BY_OTHER = "fetched_by_other"
    FULL = "full"
    """Everything else in the cache is in use, or is needed first."""


class LockedFile:
    """An open file with a lock. Closing releases the lock also for processes that were forked meanwhile."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._pid = os.getpid()

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # the lock is that of the process that has forked this one
        self._pid = -1
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Claim:
    """A part that this process fetches: write all of it, then `ShardCache.commit`, or `abandon`."""

    part: LockedFile
    whole: Path
    num_bytes: int

    def write(self, offset: int, content: bytes) -> None:
        view = memoryview(content)
        while view:
            written = os.pwrite(self.part.descriptor, view, offset)
            view, offset = view[written:], offset + written


class ShardCache:
    """A directory of whole shards, named by their URL. Any thread, any number of processes."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Raises CacheError if the directory cannot be used."""
        self.directory = directory
        self.max_bytes = max_bytes
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / _LOCK).touch()
        except OSError as error:
            raise self._unusable(error) from error

    def open_shard(self, name: str) -> LockedFile | None:
        """Open a whole shard, which stays until the file is closed; None if it is not here."""
        path = self._path(_WHOLE, name)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        with suppress(OSError):
            if try_lock(descriptor, fcntl.LOCK_SH) and os.fstat(descriptor).st_nlink:  # else it is being deleted
                os.utime(descriptor)
                return LockedFile(path, descriptor)
        os.close(descriptor)
        return None

    def has(self, name: str) -> bool:
        """Return True if the whole shard is here. It then counts as just used."""
        try:
            os.utime(self._path(_WHOLE, name))
        except OSError:
            return False
        return True

    def claim(self, name: str, num_bytes: int, keep: Collection[str] = ()) -> Claim | NoClaim:
        """Make room for a shard, which this process then fetches.

        Args:
            keep: names that are not deleted for it.

        Raises:
            CacheError: the shard alone is larger than the cache, or the directory cannot be written.
        """
        if num_bytes > self.max_bytes:
            raise CacheError(
                f"{name} has {num_bytes:,} bytes, and cache_bytes={self.max_bytes:,} is less than that. Raise "
                "cache_bytes."
            )
        try:
            with self._locked():
                return self._try_claim(name, num_bytes, {self._path(_WHOLE, kept_name).name for kept_name in keep})
        except OSError as error:
            raise self._unusable(error) from error

    def commit(self, claim: Claim) -> None:
        """Make the part whole. Raises CacheError if the disk is full or fails."""
        try:
            os.fsync(claim.part.descriptor)
            with self._locked():
                claim.part.path.rename(claim.whole)
        except OSError as error:
            self.abandon(claim)
            raise self._unusable(error) from error
        claim.part.close()

    def abandon(self, claim: Claim) -> None:
        with suppress(OSError):
            claim.part.path.unlink()
        claim.part.close()

    def discard(self, name: str) -> None:
        """Delete a shard that is damaged. Processes that read it keep what they have mapped."""
        with suppress(OSError):
            self._path(_WHOLE, name).unlink()

    def num_bytes(self) -> int:
        """Return the bytes of all files, with the final length of parts."""
        with self._locked():
            return sum(entry.num_bytes for entry in self._entries())

    def _try_claim(self, name: str, num_bytes: int, keep: Collection[str]) -> Claim | NoClaim:
        whole, part = self._path(_WHOLE, name), self._path(_PART, name)
        if whole.exists():
            return NoClaim.PRESENT
        entries = []
        for entry in self._entries():
            if entry.is_whole or not self._delete_unlocked(entry.path):  # a part of a killed process is deleted
                entries.append(entry)
        if part.exists():
            return NoClaim.FETCHED_BY_OTHER
        excess = sum(entry.num_bytes for entry in entries) + num_bytes - self.max_bytes
        for entry in sorted(entries, key=lambda entry: entry.used_ns):
            if excess <= 0:
                break
            if entry.is_whole and entry.path.name not in keep and self._delete_unlocked(entry.path):
                excess -= entry.num_bytes
        if excess > 0:
            return NoClaim.FULL
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.truncate(descriptor, num_bytes)
        return Claim(LockedFile(part, descriptor), whole, num_bytes)

    def _delete_unlocked(self, path: Path) -> bool:
        """Delete the file unless a process has locked it; True if it is gone."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return True
        file = LockedFile(path, descriptor)
        try:
            is_unused = try_lock(descriptor)
            if is_unused:
                path.unlink()
        finally:
            file.close()
        return is_unused

    def _entries(self) -> Iterator[_Entry]:
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name.startswith((_PART, _WHOLE)):
                    with suppress(FileNotFoundError):  # `discard` takes no lock
                        stat = entry.stat()
                        is_whole = entry.name.startswith(_WHOLE)
                        yield _Entry(Path(entry.path), is_whole, stat.st_size, stat.st_mtime_ns)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.directory / _LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:  # by closing alone it would stay with a process that was forked meanwhile
                fcntl.flock(file, fcntl.LOCK_UN)

    def _path(self, kind: str, name: str) -> Path:
        digest = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
        file_name = name.partition("?")[0].rstrip("/").rpartition("/")[2][-_NAME_LETTERS:]
        return self.directory / f"{kind}{digest}-{file_name}"

    def _unusable(self, error: OSError) -> CacheError:
        return CacheError(
            f"cache_dir {self.directory} cannot be used: {error.strerror or error}. Set cache_dir to a directory on a "
            f"local disk with {self.max_bytes:,} free bytes (cache_bytes), or lower cache_bytes."
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    is_whole: bool
    num_bytes: int
    used_ns: int
