"""Where checkpoint files lie: one directory, by plain path or fsspec URL.

    open_directory("/data/ckpt"), ("file:///data/ckpt")   -> LocalDirectory    rename + fsync
    open_directory("s3://bucket/ckpt"), ("memory://x")    -> RemoteDirectory   one PUT per file

Both promise the same: a file appears under its name whole or not at all, and is durable when the call returns. Whatever
goes wrong with the storage is an OSError (FileNotFoundError where something is not there), also where the library
behind the URL raises its own family. Imports no torch: the service uses it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from shoal_workers.checkpoint.local import LocalDirectory
from shoal_workers.checkpoint.remote import RemoteDirectory


class Directory(Protocol):
    """The few things that checkpoints need of a directory. Names are single path segments."""

    @property
    def url(self) -> str: ...

    @property
    def is_local(self) -> bool:
        """Reads are cheap to start: no use in having several under way."""

    def child(self, name: str) -> Directory: ...

    def create(self) -> None:
        """With its parents; no error when it is already there."""

    def files(self) -> Mapping[str, int]:
        """Length in bytes of every file directly inside. FileNotFoundError where there is no such directory."""

    def directories(self) -> list[str]:
        """Names of the directories directly inside; empty where there is no such directory."""

    def write(self, name: str, chunks: Iterable[memoryview | bytes]) -> None:
        """Replaces the file atomically; nothing is left behind under `name` when it fails."""

    def read(self, name: str) -> bytes: ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fills the buffer from `offset` on; returns the bytes read, fewer only where the file ends."""

    def remove(self, name: str) -> None:
        """No error when the file is not there."""

    def remove_tree(self) -> None:
        """The directory and everything in it; no error when it is not there."""


def open_directory(url: str) -> Directory:
    """Touches nothing yet. OSError when the URL's protocol is unknown or its library is not installed."""
    if "://" not in url and "::" not in url:
        return LocalDirectory(Path(url).expanduser().absolute())
    if url.startswith("file://"):
        return LocalDirectory(Path(url.removeprefix("file://")))
    return RemoteDirectory.open(url)


def join(root: str, name: str) -> str:
    """The URL of an entry of a directory."""
    return f"{root.rstrip('/')}/{name}"
