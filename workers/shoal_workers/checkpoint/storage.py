"""Storage of checkpoint files: one directory, by plain path or fsspec URL.

    open_directory("/data/ckpt"), ("file:///data/ckpt")   -> LocalDirectory    rename + fsync
    open_directory("s3://bucket/ckpt"), ("memory://x")    -> RemoteDirectory   one PUT per file

Both guarantee that a file appears under its name as a whole or not at all, and is durable when the call returns. Every
failure of the storage is an OSError (FileNotFoundError if something does not exist), even if the library behind the URL
raises errors of its own. Imports no torch, since the service uses it too.

An object store needs no rename: a PUT, also in parts, becomes visible as a whole or not at all (only memory:// keeps
what was written before a failure). The libraries raise errors of their own (those of botocore are not OSErrors), and
cache listings; `RemoteDirectory` converts the errors and clears the caches.
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shoal_workers.checkpoint.local import LocalDirectory

_PART_BYTES = 32 << 20
"""Bytes per request, both ways; S3 allows 10,000 parts of an upload, so a file may have 312 GiB."""

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "r2"})
"""Protocols without directories. s3fs would create the *bucket* instead, so a misspelt URL would seem to work."""


@dataclass(frozen=True, slots=True)
class RemoteDirectory:
    """A directory of anything that fsspec can open: an object store, or memory:// in tests."""

    url: str
    path: str
    filesystem: Any
    is_local: bool = False

    @staticmethod
    def open(url: str) -> RemoteDirectory:
        with _as_os_error(url):
            filesystem, path = fsspec.core.url_to_fs(url)
        return RemoteDirectory(url.rstrip("/"), path.rstrip("/"), filesystem)

    def local_path(self) -> str | None:
        """Return the path if this is a directory of this host (`local://`); None if it is not.

        Raises:
            OSError: a store over local files, such as `simplecache::file://`, which would follow symbolic links.
        """
        inner = self.filesystem
        while (below := getattr(inner, "fs", None)) is not None:
            inner = below
        if not isinstance(inner, LocalFileSystem):
            return None
        if inner is not self.filesystem:
            raise OSError(f"{self.url}: it is a store over local files; name the directory itself by its path")
        return self.path or "/"

    def child(self, name: str) -> RemoteDirectory:
        return RemoteDirectory(f"{self.url}/{name}", f"{self.path}/{name}", self.filesystem)

    def create(self) -> None:
        if not _OBJECT_STORES.isdisjoint(_protocols(self.filesystem)):
            return
        with _as_os_error(self.url):
            self.filesystem.makedirs(self.path, exist_ok=True)

    def files(self) -> Mapping[str, int]:
        return {posixpath.basename(e["name"]): int(e["size"]) for e in self._entries() if e["type"] == "file"}

    def directories(self) -> list[str]:
        try:
            return [posixpath.basename(e["name"].rstrip("/")) for e in self._entries() if e["type"] == "directory"]
        except FileNotFoundError:
            return []

    def write(self, name: str, chunks: Iterable[memoryview | bytes]) -> None:
        path = f"{self.path}/{name}"
        with _as_os_error(f"{self.url}/{name}"):
            file = self.filesystem.open(path, "wb", block_size=_PART_BYTES)
            try:
                for chunk in chunks:
                    file.write(chunk)
                file.close()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to raise
                    file.discard()
                with contextlib.suppress(
                    AttributeError
                ):  # otherwise the garbage collector closes the file, which publishes it
                    file.closed = True
                raise

    def create_file(self, name: str, data: bytes) -> bool:
        path = f"{self.path}/{name}"
        with _as_os_error(f"{self.url}/{name}"):
            self.filesystem.invalidate_cache()
            if self.filesystem.exists(path):  # not every store knows conditional writes
                return False
            try:
                self.filesystem.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno != errno.EINVAL:  # s3fs's word for a refused condition (HTTP 412)
                    raise
                self.filesystem.invalidate_cache()
                if not self.filesystem.exists(path):
                    raise
                return False
        return True

    def read(self, name: str) -> bytes:
        with _as_os_error(f"{self.url}/{name}"):
            return bytes(self.filesystem.cat_file(f"{self.path}/{name}"))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            end = min(done + _PART_BYTES, len(buffer))
            with _as_os_error(f"{self.url}/{name}"):
                data = self.filesystem.cat_file(f"{self.path}/{name}", start=offset + done, end=offset + end)
            buffer[done : done + len(data)] = data
            done += len(data)
            if done < end:
                break
        return done

    def remove(self, name: str) -> None:
        with _as_os_error(f"{self.url}/{name}"), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(f"{self.path}/{name}")

    def remove_tree(self) -> None:
        with _as_os_error(self.url), contextlib.suppress(FileNotFoundError):
            self.filesystem.invalidate_cache()
            self.filesystem.rm(self.path, recursive=True)

    def _entries(self) -> list[dict[str, Any]]:
        with _as_os_error(self.url):
            self.filesystem.invalidate_cache()
            return [e for e in self.filesystem.ls(self.path, detail=True) if e["name"].rstrip("/") != self.path]


def _protocols(filesystem: Any) -> tuple[str, ...]:
    return (filesystem.protocol,) if isinstance(filesystem.protocol, str) else tuple(filesystem.protocol)


@contextlib.contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


Directory = LocalDirectory | RemoteDirectory
"""Has the operations that checkpoints need, with the same methods either way; names are single path segments."""


def open_directory(url: str, *, follows_links: bool = False) -> Directory:
    """Return the directory of a URL, without access to the storage.

    Symbolic links are followed up to the directory that the URL names. Below it they are followed only with
    `follows_links`, which is for directories that no job writes.

    Raises:
        OSError: the URL's protocol is unknown, or its library is not installed.
    """
    if "://" not in url and "::" not in url:
        return LocalDirectory(Path(url).expanduser().absolute(), follows_links=follows_links)
    if url.startswith("file://"):
        return LocalDirectory(Path(url.removeprefix("file://")), follows_links=follows_links)
    remote = RemoteDirectory.open(url)
    if (path := remote.local_path()) is not None:
        return LocalDirectory(Path(path), follows_links=follows_links)
    return remote


def open_job_directory(root: str) -> Directory:
    """Return a job's directory, as `open_directory` does, but do not follow it if it is a symbolic link itself.

    The code of another job may have put the link there.
    """
    above, _, job_id = root.rstrip("/").rpartition("/")
    opened = open_directory(root)
    return open_directory(above or "/").child(job_id) if isinstance(opened, LocalDirectory) else opened


def join(root: str, name: str) -> str:
    """Return the URL of an entry of a directory."""
    return f"{root.rstrip('/')}/{name}"
