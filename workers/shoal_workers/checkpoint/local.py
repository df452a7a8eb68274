"""A directory of a mounted file system. A finished write survives a power failure: file and directory are synced.

It never maps files into memory: if a mapped file is truncated or its disk fails, access kills the process with SIGBUS,
while a read returns an error that can be reported.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

TEMPORARY_SUFFIX = ".writing"


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    path: Path
    is_local: bool = True

    @property
    def url(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalDirectory:
        return LocalDirectory(self.path / name)

    def create(self) -> None:
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for created in missing:
            _sync_directory(created.parent)

    def files(self) -> Mapping[str, int]:
        with os.scandir(self.path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def directories(self) -> list[str]:
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []

    def write(self, name: str, chunks: Iterable[memoryview | bytes]) -> None:
        temporary = self.path / (name + TEMPORARY_SUFFIX)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                for chunk in chunks:
                    _write_all(descriptor, memoryview(chunk))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(self.path / name)
            _sync_directory(self.path)
        except BaseException:
            try:
                temporary.unlink(missing_ok=True)
            except OSError:  # the first error is the one to raise
                pass
            raise

    def create_file(self, name: str, data: bytes) -> bool:
        draft = f"{name}.{uuid.uuid4().hex}"
        self.write(draft, [data])
        try:
            os.link(self.path / draft, self.path / name)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            if (self.path / name).exists():  # a file system without hard links
                return False
            self.write(name, [data])
        finally:
            (self.path / draft).unlink(missing_ok=True)
        _sync_directory(self.path)
        return True

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(buffer):  # one call reads at most 2 GiB - 4 KiB
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return done
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)
        if self.path.exists():
            _sync_directory(self.path)

    def remove_tree(self) -> None:
        try:
            shutil.rmtree(self.path)
        except FileNotFoundError:
            return
        _sync_directory(self.path.parent)


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
