"""Storage of checkpoint files: one directory, by plain path or fsspec URL.

    open_directory("/data/ckpt"), ("file:///data/ckpt")   -> LocalDirectory    rename + fsync
    open_directory("s3://bucket/ckpt"), ("memory://x")    -> RemoteDirectory   one PUT per file

Both guarantee that a file appears under its name as a whole or not at all, and is durable when the call returns. Every
failure of the storage is an OSError (FileNotFoundError if something does not exist), even if the library behind the URL
raises errors of its own. Imports no torch, since the service uses it too.
"""

from __future__ import annotations

from pathlib import Path

from shoal_workers.checkpoint.local import LocalDirectory
from shoal_workers.checkpoint.remote import RemoteDirectory

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
