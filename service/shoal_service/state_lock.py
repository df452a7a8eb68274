"""StateLock: one server at a time uses a state directory. A file with its pid and address, locked by the kernel.

The lock ends with the process that holds it, however that ends: the file of a dead server is taken over at once. It
holds on one machine, and over NFS if the mount supports locks.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

FILE = "server.lock"


class Owner(BaseModel):
    """What the lock's file says about the server that holds it."""

    model_config = ConfigDict(frozen=True)

    pid: int
    host: str
    since: float
    """Seconds since the epoch."""
    url: str = ""
    """Where it listens; empty: it does not yet."""


@dataclass(eq=False)
class StateDirectoryInUse(ValueError):
    """Another server uses the directory."""

    code = "state_dir_in_use"

    directory: str
    owner: Owner | None

    def __str__(self) -> str:
        who = "another server"
        if self.owner is not None:
            where = f", {self.owner.url}" if self.owner.url else ""
            who = f"the server with pid {self.owner.pid} on {self.owner.host}{where}"
        return (
            f"state_dir {self.directory} is in use by {who}. Stop that server, or give this one another directory "
            "(--state-dir, SHOAL_STATE_DIR)."
        )


class StateLock(AbstractContextManager["StateLock"]):
    """Locks a state directory from `take` until `release`. Used by one thread."""

    def __init__(self, directory: Path, descriptor: int, owner: Owner) -> None:
        self._path = directory / FILE
        self._descriptor = descriptor
        self._owner = owner

    @classmethod
    def take(cls, directory: Path) -> StateLock:
        """Takes the lock. Creates the directory if it does not exist. Raises StateDirectoryInUse."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            known = _read(descriptor)
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise StateDirectoryInUse(str(directory), known) from None
        lock = cls(directory, descriptor, Owner(pid=os.getpid(), host=os.uname().nodename, since=time.time()))
        lock._write()
        return lock

    @classmethod
    def take_for_process(cls, directory: Path) -> StateLock:
        """Takes the lock until this process has ended its last thread, which may use the directory after its server has
        stopped. Raises StateDirectoryInUse."""
        lock = cls.take(directory)
        atexit.register(lock.release)
        return lock

    def listens_at(self, url: str) -> None:
        """Notes the address for the message to a second server."""
        self._owner = self._owner.model_copy(update={"url": url})
        self._write()

    def release(self) -> None:
        """Releases the lock. The file stays, empty: to delete it would let two servers lock two files of one name."""
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def __exit__(self, *_: object) -> None:
        self.release()

    def _write(self) -> None:
        data = self._owner.model_dump_json().encode()
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))


def owner_of(directory: Path) -> Owner | None:
    """The server that uses the directory now; None if there is none, or it does not say who it is."""
    try:
        lock = StateLock.take(directory)
    except StateDirectoryInUse as error:
        return error.owner
    lock.release()
    return None


def _read(descriptor: int) -> Owner | None:
    try:
        return Owner.model_validate_json(os.pread(descriptor, 65536, 0))
    except ValidationError:
        return None  # being written
