"""A directory of a mounted file system. A finished write survives a power failure: file and directory are synced.

    base                       named by an administrator or a user; its symbolic links are followed
      below[0]/below[1]/name   written by jobs: each segment is opened from the descriptor of its parent (openat)

Below the base only directories and regular files count: a symbolic link, a pipe or a device raises FileNotFoundError,
is not listed, and is removed itself, not its target. So the code of a job can never choose which files a reader of its
directory opens: no path is checked first and opened later.

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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal_workers.descriptors import close_after

TEMPORARY_SUFFIX = ".writing"
_SEARCH = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_REGULAR = "is not a regular file or directory; symbolic links are not followed in a directory that jobs write"


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    base: Path
    below: tuple[str, ...] = ()
    follows_links: bool = False
    """Set for a directory that no job writes, such as a cache of model weights, whose files are links."""
    is_local: bool = True
    """True: reads have no latency, so parallel reads would not be faster."""

    @property
    def path(self) -> Path:
        """The path for messages; it is never opened."""
        return self.base.joinpath(*self.below)

    @property
    def url(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalDirectory:
        return LocalDirectory(self.base, (*self.below, _check_name(name)), self.follows_links)

    def create(self) -> None:
        """Create the directory with its parents; no error if it exists."""
        missing = [path for path in (self.base, *self.base.parents) if not path.exists()]
        self.base.mkdir(parents=True, exist_ok=True)
        for created in missing:
            # A new directory survives a power failure once its parent is synced.
            with LocalDirectory(created.parent).open_descriptor() as parent:
                _sync(parent)
        for depth, name in enumerate(self.below):
            parent_directory = LocalDirectory(self.base, self.below[:depth], self.follows_links)
            with parent_directory.open_descriptor() as parent:
                try:
                    os.mkdir(name, dir_fd=parent)
                except FileExistsError:
                    continue  # if it is not a directory, opening it raises
                _share_with_group(parent, name)
                _sync(parent)
        with self.open_descriptor():
            pass

    def files(self) -> Mapping[str, int]:
        """Return the bytes of each file directly inside. Raises FileNotFoundError without the directory."""
        sizes = {}
        with self.open_descriptor() as directory, _scan(directory) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=self.follows_links):
                    with suppress(FileNotFoundError):  # a draft that has got its name, or was removed, since
                        sizes[entry.name] = entry.stat(follow_symlinks=self.follows_links).st_size
        return sizes

    def directories(self) -> list[str]:
        """Return the names of the directories directly inside; empty if the directory does not exist."""
        try:
            with self.open_descriptor() as directory, _scan(directory) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=self.follows_links)]
        except FileNotFoundError:
            return []

    def write(self, name: str, chunks: Iterable[memoryview | bytes]) -> None:
        """Replace the file atomically. A call that fails leaves no file of its own."""
        temporary = _check_name(name) + TEMPORARY_SUFFIX
        with self.open_descriptor() as directory:
            try:
                draft = self._open_file(directory, temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                with close_after(draft):
                    for chunk in chunks:
                        _write_all(draft, memoryview(chunk))
                    # The content before the name: after a power failure the name must not lead to partial content.
                    os.fsync(draft)
                os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
                _sync(directory)
            except BaseException:
                try:
                    os.unlink(temporary, dir_fd=directory)
                except OSError:  # the first error is the one to raise
                    pass
                raise

    def create_file(self, name: str, data: bytes) -> bool:
        """Write the whole file, unless a file of this name exists; False if it exists.

        Of two callers one gets True, if the storage can decide that: mounted file systems with hard links, and object
        stores with conditional writes. Elsewhere two callers at the same moment may both get True, and the file of the
        later one stays.
        """
        draft = f"{_check_name(name)}.{uuid.uuid4().hex}"
        self.write(draft, [data])
        with self.open_descriptor() as directory:
            try:
                # A link fails if the name exists. A rename would replace the file of the first caller.
                os.link(draft, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise
                with _scan(directory) as entries:  # a file system without hard links
                    if any(entry.name == name for entry in entries):
                        return False
                self.write(name, [data])
            finally:
                _unlink(directory, draft)
            _sync(directory)
        return True

    def read(self, name: str) -> bytes:
        with self.open_descriptor() as directory, self._open_regular_file(directory, name) as descriptor:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read()

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from `offset` on. Return the bytes read: fewer only at the end of the file."""
        with self.open_descriptor() as directory, self._open_regular_file(directory, name) as descriptor:
            done = 0
            while done < len(buffer):  # one call reads at most 2 GiB - 4 KiB
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return done

    def remove(self, name: str) -> None:
        """Remove the file; no error if it does not exist."""
        try:
            with self.open_descriptor() as directory:
                _unlink(directory, _check_name(name))
                _sync(directory)
        except FileNotFoundError:
            return

    def remove_tree(self) -> None:
        """Remove the directory with its content; no error if it does not exist."""
        above = LocalDirectory(self.base, self.below[:-1]) if self.below else LocalDirectory(self.base.parent)
        name = self.below[-1] if self.below else self.base.name
        try:
            with above.open_descriptor() as parent:
                if stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
                    _unlink(parent, name)
                else:
                    shutil.rmtree(name, dir_fd=parent)  # it follows no links
                _sync(parent)
        except FileNotFoundError:
            return

    @contextmanager
    def open_descriptor(self) -> Iterator[int]:
        """Open a descriptor for `dir_fd`; it stays that of this directory, whatever its path becomes."""
        descriptor = os.open(self.base, _SEARCH)
        try:
            for depth, name in enumerate(self.below, 1):
                flags = _SEARCH if self.follows_links else _SEARCH | os.O_NOFOLLOW
                try:
                    above, descriptor = descriptor, os.open(name, flags, dir_fd=descriptor)
                except OSError as error:
                    raise _add_path(error, descriptor, name, self.base.joinpath(*self.below[:depth])) from None
                os.close(above)
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_file(self, directory: int, name: str, flags: int) -> int:
        flags |= os.O_CLOEXEC | (0 if self.follows_links else os.O_NOFOLLOW)
        try:
            return os.open(_check_name(name), flags, 0o644, dir_fd=directory)
        except OSError as error:
            raise _add_path(error, directory, name, self.path / name) from None

    @contextmanager
    def _open_regular_file(self, directory: int, name: str) -> Iterator[int]:
        """Open a descriptor to read from. A pipe is opened without waiting for its writer, and refused."""
        with close_after(self._open_file(directory, name, os.O_RDONLY | os.O_NONBLOCK)) as descriptor:
            kind = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(kind):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.path / name))
            if not stat.S_ISREG(kind):
                raise FileNotFoundError(errno.ENOENT, _NOT_REGULAR, str(self.path / name))
            yield descriptor


def _check_name(name: str) -> str:
    """Return the name. Raises FileNotFoundError if it would leave the directory: no directory has such an entry."""
    if name in ("", ".", "..") or "/" in name:
        raise FileNotFoundError(errno.ENOENT, "is not the name of an entry of a directory", name)
    return name


def _add_path(error: OSError, directory: int, name: str, path: Path) -> OSError:
    """Return the error with its whole path; that of a link or a pipe says that there is no such file."""
    try:
        kind = os.lstat(name, dir_fd=directory).st_mode
    except OSError:
        kind = stat.S_IFREG
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO) and not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        return FileNotFoundError(errno.ENOENT, _NOT_REGULAR, str(path))
    return OSError(error.errno, error.strerror, str(path))


@contextmanager
def _scan(directory: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    with _readable(directory) as descriptor, os.scandir(descriptor) as entries:
        yield entries


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


def _unlink(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass


def _share_with_group(parent: int, name: str) -> None:
    """Let the group of the parent write a new directory too.

    Workers, and the control plane, which deletes checkpoints, are different users of one group.
    """
    above, child = os.fstat(parent), os.stat(name, dir_fd=parent, follow_symlinks=False)
    if above.st_mode & stat.S_IWGRP and above.st_gid == child.st_gid and not child.st_mode & stat.S_IWGRP:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with close_after(os.open(name, flags, dir_fd=parent)) as directory:
            os.fchmod(directory, stat.S_IMODE(child.st_mode) | stat.S_IRWXG)


def _sync(directory: int) -> None:
    with _readable(directory) as descriptor:
        os.fsync(descriptor)


def _readable(directory: int) -> AbstractContextManager[int]:
    """Open a directory again for reading: one that is open by O_PATH can be neither listed nor synced."""
    return close_after(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory))
