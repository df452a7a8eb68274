"""A directory of a mounted file system. A finished write survives a power failure: file and directory are synced.

    base                       named by an administrator or a user; its own symbolic links are followed
      below[0]/below[1]/name   written by jobs: each segment is opened from the descriptor of the one above (openat)

Below the base there are directories and regular files, nothing else: a symbolic link, a pipe or a device raises
FileNotFoundError, is not listed, and is removed itself, not what it leads to. So the code of a job cannot choose which
files a reader of its directory opens, at no moment, since no path is checked first and opened later.

It never maps files into memory: if a mapped file is truncated or its disk fails, access kills the process with SIGBUS,
while a read returns an error that can be reported.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TEMPORARY_SUFFIX = ".writing"
_SEARCH = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NO_SUCH = "is no regular file or directory; symbolic links are not followed in a directory that jobs write"


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    base: Path
    below: tuple[str, ...] = ()
    follows_links: bool = False
    """Set for a directory that no job writes, such as a cache of model weights, whose files are links."""
    is_local: bool = True
    """Reads have no latency, so parallel reads would not be faster."""

    @property
    def path(self) -> Path:
        """The path for messages; it is never opened."""
        return self.base.joinpath(*self.below)

    @property
    def url(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalDirectory:
        return LocalDirectory(self.base, (*self.below, _segment(name)), self.follows_links)

    def create(self) -> None:
        """Creates it, with its parents; no error if it exists."""
        missing = [p for p in (self.base, *self.base.parents) if not p.exists()]
        self.base.mkdir(parents=True, exist_ok=True)
        for created in missing:
            # A new directory survives a power failure once the one above it is synced.
            with LocalDirectory(created.parent).opened() as parent:
                _sync(parent)
        for depth, name in enumerate(self.below):
            parent_directory = LocalDirectory(self.base, self.below[:depth], self.follows_links)
            with parent_directory.opened() as parent:
                try:
                    os.mkdir(name, dir_fd=parent)
                except FileExistsError:
                    continue  # what it is, its use finds out
                _share(parent, name)
                _sync(parent)
        with self.opened():
            pass

    def files(self) -> Mapping[str, int]:
        """Length in bytes of every file directly inside. FileNotFoundError if the directory does not exist."""
        with self.opened() as here, _entries(here) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=self.follows_links).st_size
                for entry in entries
                if entry.is_file(follow_symlinks=self.follows_links)
            }

    def directories(self) -> list[str]:
        """Names of the directories directly inside; empty if the directory does not exist."""
        try:
            with self.opened() as here, _entries(here) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=self.follows_links)]
        except FileNotFoundError:
            return []

    def write(self, name: str, chunks: Iterable[memoryview | bytes]) -> None:
        """Replaces the file atomically. If it fails, no file of this name remains from this call."""
        temporary = _segment(name) + TEMPORARY_SUFFIX
        with self.opened() as here:
            try:
                descriptor = self._open(here, temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                try:
                    for chunk in chunks:
                        _write_all(descriptor, memoryview(chunk))
                    # The content before the name: after a power failure the name must not lead to a part of it.
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                os.replace(temporary, name, src_dir_fd=here, dst_dir_fd=here)
                _sync(here)
            except BaseException:
                try:
                    os.unlink(temporary, dir_fd=here)
                except OSError:  # the first error is the one to raise
                    pass
                raise

    def create_file(self, name: str, data: bytes) -> bool:
        """Writes the file as a whole, unless there is one of this name; False: there is. Of two callers one gets True,
        if the storage can decide that: mounted file systems with hard links, and object stores with conditional writes.
        Elsewhere two callers at the same moment may both get True, and the later one's file stays."""
        draft = f"{_segment(name)}.{uuid.uuid4().hex}"
        self.write(draft, [data])
        with self.opened() as here:
            try:
                # One step that fails if the name exists. A rename would replace the file of the first caller.
                os.link(draft, name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise
                with _entries(here) as entries:  # a file system without hard links
                    if any(entry.name == name for entry in entries):
                        return False
                self.write(name, [data])
            finally:
                _unlink(here, draft)
            _sync(here)
        return True

    def read(self, name: str) -> bytes:
        with self.opened() as here, self._regular_file(here, name) as descriptor:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read()

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fills the buffer from `offset` on; returns the bytes read, fewer only at the end of the file."""
        with self.opened() as here, self._regular_file(here, name) as descriptor:
            done = 0
            while done < len(buffer):  # one call reads at most 2 GiB - 4 KiB
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return done

    def remove(self, name: str) -> None:
        """No error if the file does not exist."""
        try:
            with self.opened() as here:
                _unlink(here, _segment(name))
                _sync(here)
        except FileNotFoundError:
            return

    def remove_tree(self) -> None:
        """Removes the directory with its content; no error if it does not exist."""
        above = LocalDirectory(self.base, self.below[:-1]) if self.below else LocalDirectory(self.base.parent)
        name = self.below[-1] if self.below else self.base.name
        try:
            with above.opened() as parent:
                if stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
                    _unlink(parent, name)
                else:
                    shutil.rmtree(name, dir_fd=parent)  # it follows no links
                _sync(parent)
        except FileNotFoundError:
            return

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the directory, to be used as `dir_fd`; the directory that it names stays the same one."""
        descriptor = os.open(self.base, _SEARCH)
        try:
            for depth, name in enumerate(self.below, 1):
                flags = _SEARCH if self.follows_links else _SEARCH | os.O_NOFOLLOW
                try:
                    above, descriptor = descriptor, os.open(name, flags, dir_fd=descriptor)
                except OSError as error:
                    raise _named(error, descriptor, name, self.base.joinpath(*self.below[:depth])) from None
                os.close(above)
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, here: int, name: str, flags: int) -> int:
        flags |= os.O_CLOEXEC | (0 if self.follows_links else os.O_NOFOLLOW)
        try:
            return os.open(_segment(name), flags, 0o644, dir_fd=here)
        except OSError as error:
            raise _named(error, here, name, self.path / name) from None

    @contextmanager
    def _regular_file(self, here: int, name: str) -> Iterator[int]:
        """A descriptor to read from. A pipe is opened without waiting for its writer, and refused."""
        descriptor = self._open(here, name, os.O_RDONLY | os.O_NONBLOCK)
        try:
            kind = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(kind):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path / name))
            if not stat.S_ISREG(kind):
                raise FileNotFoundError(errno.ENOENT, _NO_SUCH, str(self.path / name))
            yield descriptor
        finally:
            os.close(descriptor)


def _segment(name: str) -> str:
    """FileNotFoundError for a name that would leave the directory: no directory has such an entry."""
    if name in ("", ".", "..") or "/" in name:
        raise FileNotFoundError(errno.ENOENT, "is not the name of an entry of a directory", name)
    return name


def _named(error: OSError, here: int, name: str, path: Path) -> OSError:
    """The error with its whole path; a link or a pipe is, for this class, not there."""
    try:
        kind = os.lstat(name, dir_fd=here).st_mode
    except OSError:
        kind = stat.S_IFREG
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO) and not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        return FileNotFoundError(errno.ENOENT, _NO_SUCH, str(path))
    return OSError(error.errno, error.strerror, str(path))


@contextmanager
def _entries(here: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
    try:
        with os.scandir(descriptor) as entries:
            yield entries
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


def _unlink(here: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=here)
    except FileNotFoundError:
        pass


def _share(parent: int, name: str) -> None:
    """A new directory may be written by the group that may write the one above it: workers and the control plane, which
    deletes checkpoints, are different users of one group."""
    above, made = os.fstat(parent), os.stat(name, dir_fd=parent, follow_symlinks=False)
    if above.st_mode & stat.S_IWGRP and above.st_gid == made.st_gid and not made.st_mode & stat.S_IWGRP:
        here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.fchmod(here, stat.S_IMODE(made.st_mode) | stat.S_IRWXG)
        finally:
            os.close(here)


def _sync(here: int) -> None:
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
