"""Files that fsspec can open: what a URL names, and reading it by ranges that are tried again after a passing failure.

Hidden here: fsspec, what its libraries raise (those of botocore and aiohttp are not all OSErrors), which failures pass
by themselves, and servers that answer a range with the whole file. A file is read without a copy on disk. Called by
`sources`, and by the streaming of shards.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import fsspec
from fsspec.spec import AbstractBufferedFile

from shoal_workers.contract.backoff import backoff_s
from shoal_workers.data.errors import MissingTextError

T = TypeVar("T")
BLOCK_BYTES = 8 << 20
"""Bytes per request of a file that is read from its begin to its end."""
_RETRIES = 6
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 10.0
_SILENT_S = 30.0
"""The longest time for one request of a few MiB."""
_PASSING_STATUS = frozenset({408, 425, 429})
_HTTP = frozenset({"http", "https"})
_VERSION_KEYS = ("ETag", "etag", "checksum", "md5Hash", "Last-Modified", "LastModified", "last_modified", "mtime")
"""Names under which fsspec's libraries say which version of an object there is, the surest first."""


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A file, as its store describes it."""

    url: str
    num_bytes: int
    version: str
    """Another one whenever the content changes; empty: the store has none."""
    was_walked: bool
    """It was found by listing what is below a URL."""


def is_url(place: str) -> bool:
    return "://" in place


def list_remote(url: str) -> list[RemoteEntry]:
    """Return the files that a URL, or a pattern in a URL, names; below a directory all of them, without hidden ones.
    Sorted by name, and empty if there are none.

    Raises:
        MissingTextError: the store cannot be read, the library for it is missing, or a file has no known length.
    """
    if "::" in url:
        raise MissingTextError(
            f"{url!r} is a chain of stores, which is not read. Name the URL of the files themselves."
        )
    filesystem, path = _opened(url)
    wildcards = "*[" if _is_http(filesystem) else "*?["  # a question mark begins the query of an http URL
    if any(letter in path for letter in wildcards):
        matched = _tried(url, lambda: filesystem.glob(path, detail=True))
        entries = {name: entry for name, entry in matched.items() if not _is_hidden(name.rpartition("/")[2])}
        walked: dict[str, Any] = {}
        for name, entry in entries.items():
            walked |= _below(filesystem, url, name) if entry["type"] == "directory" else {}
        files = {name: entry for name, entry in entries.items() if entry["type"] == "file"}
    else:
        files, walked = {}, {}
        is_page_of_links = _is_http(filesystem) and path.endswith("/")
        entry = None if is_page_of_links else _info(filesystem, url, path)
        if entry is not None and entry["type"] == "file":
            files = {path: entry}
        elif is_page_of_links or not _is_http(filesystem):
            walked = _below(filesystem, url, path)
    named = [_entry(filesystem, url, name, entry, walked=False) for name, entry in sorted(files.items())]
    return named + [_entry(filesystem, url, name, entry, walked=True) for name, entry in sorted(walked.items())]


def remote_size(url: str, *, patience_s: float) -> int:
    """Return the length of a file. Raises as `read_range`."""
    filesystem, path = _opened(url)
    info: Any = _tried(url, lambda: _called(filesystem, "info", path), _delays(patience_s))
    if info.get("size") is None:
        raise MissingTextError(f"{url} has no known length: the server does not say one. Use a server that does.")
    return int(info["size"])


def read_range(url: str, start: int, end: int, *, patience_s: float) -> bytes:
    """Return the bytes of a file from `start` up to `end`, or to its end if that comes first. Any thread.

    Args:
        patience_s: for how long a server that is busy or cannot be reached is asked again.

    Raises:
        MissingTextError: it failed for good, or for too long.
        FileNotFoundError: there is no such file.
    """
    filesystem, path = _opened(url)
    data = _tried(
        url,
        lambda: bytes(_called(filesystem, "cat_file", path, start=start, end=end)),
        _delays(patience_s),
    )
    return data if len(data) <= end - start else data[start:end]  # the second: this server knows no ranges


def _called(filesystem: Any, name: str, *arguments: Any, **named: Any) -> Any:
    """A call of a file system; if its library can be interrupted, a connection that stays silent counts as broken."""
    if not getattr(filesystem, "async_impl", False):
        return getattr(filesystem, name)(*arguments, **named)
    function = getattr(filesystem, f"_{name}")
    return fsspec.asyn.sync(filesystem.loop, function, *arguments, timeout=_SILENT_S, **named)


class RemoteFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file of a store, for reading at any place; keeps the last range that it asked for.

    Raises MissingTextError when the store fails for good.
    """

    def __init__(self, url: str, num_bytes: int, ahead_bytes: int) -> None:
        """`ahead_bytes`: read beyond what is asked for."""
        filesystem, path = _opened(url)
        super().__init__(filesystem, path, block_size=ahead_bytes, cache_type="readahead", size=num_bytes)
        self._url = url
        self._whole = b""
        """The whole file, if the server knows no ranges: it always sends this."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        if self._whole:
            return self._whole[start:end]
        data = _tried(self._url, lambda: bytes(self.fs.cat_file(self.path, start=start, end=end)))
        if len(data) == self.size > end - start:
            self._whole = data
            return data[start:end]
        if len(data) != end - start:
            raise MissingTextError(
                f"{self._url} cannot be read: {end - start:,} bytes were asked for at {start:,}, and {len(data):,} "
                "came. The file may have changed; prepare the data again."
            )
        return data


def _opened(url: str) -> tuple[Any, str]:
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        extra = " (for s3://: pip install 'shoal[s3]')" if url.startswith("s3") else ""
        raise MissingTextError(f"{url!r} cannot be read: {error}. Install it on every node{extra}.") from error
    except ValueError as error:  # fsspec does not know the protocol
        raise MissingTextError(f"{url!r} cannot be read: {error}.") from error
    return filesystem, path


def _is_http(filesystem: Any) -> bool:
    protocol = filesystem.protocol
    return not _HTTP.isdisjoint((protocol,) if isinstance(protocol, str) else protocol)


def _info(filesystem: Any, url: str, path: str) -> dict[str, Any] | None:
    try:
        info: dict[str, Any] = _tried(url, lambda: filesystem.info(path))
    except FileNotFoundError:
        return None
    return info


def _below(filesystem: Any, url: str, path: str) -> dict[str, Any]:
    try:
        entries = _tried(url, lambda: filesystem.find(path, detail=True))
    except FileNotFoundError:
        return {}
    root = path.rstrip("/") + "/"
    return {name: entry for name, entry in entries.items() if not _is_hidden(name.removeprefix(root))}


def _is_hidden(relative: str) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.split("/"))


def _entry(filesystem: Any, entry: str, name: str, info: dict[str, Any], *, walked: bool) -> RemoteEntry:
    url = filesystem.unstrip_protocol(name)
    if info.get("size") is None:
        info = _info(filesystem, url, name) or info
    if info.get("size") is None:
        raise MissingTextError(
            f"{url} (of {entry!r}) has no known length: the server does not say one. Download it to a directory that "
            "every node can read, and name that."
        )
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    return RemoteEntry(url, int(info["size"]), version, walked)


def _tried(url: str, call: Callable[[], T], delays: Iterator[float] | None = None) -> T:
    """Call again after a failure that may pass. FileNotFoundError comes through.

    Raises:
        MissingTextError: it failed for good, or too often.
    """
    delays = delays or _delays()
    while True:
        try:
            return call()
        except Exception as error:
            delay = next(delays, None) if may_pass(error) else None
            if delay is not None:
                time.sleep(delay)
            elif isinstance(error, FileNotFoundError):
                raise
            else:
                message = str(error) or type(error).__name__
                raise MissingTextError(f"{url} cannot be read: {message}.") from error


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later: a busy or restarting server, a broken connection."""
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in _PASSING_STATUS
    if isinstance(error, FileNotFoundError):
        # fsspec says this of every answer of an http server that has no length, with the answer as the cause
        return error.__cause__ is not None and may_pass(error.__cause__)
    if isinstance(error, PermissionError | NotADirectoryError | IsADirectoryError):
        return False
    return isinstance(error, OSError | TimeoutError) or type(error).__module__.startswith("aiohttp")


def _delays(patience_s: float | None = None) -> Iterator[float]:
    """Yield the seconds before each retry: as many as fit into `patience_s`, or _RETRIES if it is None."""
    deadline_mono = time.monotonic() + (math.inf if patience_s is None else patience_s)
    for failures in count(1) if patience_s is not None else range(1, _RETRIES + 1):
        if time.monotonic() >= deadline_mono:
            return
        yield backoff_s(failures, first_s=_FIRST_DELAY_S, longest_s=_LONGEST_DELAY_S, spread=random.random())
