"""Read samples of shards in a store: from a local copy, else by range requests, else by fetching the whole shard.

    sample of a shard --- open in this process? ------------------------------ read
                      |-- whole in the cache? -> open, check its size -------- read
                      |-- the format has a table of samples? -> range requests read
                      `-- fetch the shard, or wait for the process that does -> open, check its size -> read

Prefetching calls `fetch` too. A name that is not a URL is a file on this node, which is opened in place. A shard whose
number of samples differs from the expected one is an error on every path.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shoal_workers.data.errors import CacheError, DataError, MissingTextError, ShardSizeError
from shoal_workers.data.remote import BLOCK_BYTES, is_url, read_range, remote_size
from shoal_workers.data.streaming.cache import LockedFile, NoClaim, ShardCache
from shoal_workers.data.streaming.kinds import ShardKind, StoredShard
from shoal_workers.data.streaming.shard_list import ShardList
from shoal_workers.recently_used import RecentlyUsed

_PATIENCE_S = 300.0
"""Time for which training waits for a store that is down, before the job fails."""
_ROOM_PATIENCE_S = 60.0
"""Time for which training waits for room in a full cache, before the job fails."""
_POLL_S = (0.01, 0.2)
"""First and longest pause between two checks of a shard that another process fetches."""
_RANGE_THREADS = 32
_TABLES_PER_OPEN_SHARD = 4
"""Cached sample tables of shards that are read by ranges, for each shard that may be open."""
_FILE = "file://"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _OpenShard:
    samples: Sequence[Any]
    file: LockedFile | None
    """None for a file that is not in the cache."""

    def close(self) -> None:
        """Unlock the file; a thread that still reads it has it mapped."""
        if self.file is not None:
            self.file.close()


class ShardReader:
    """Reads shards on any thread of one process."""

    def __init__(
        self,
        shards: ShardList,
        kind: ShardKind,
        cache: ShardCache,
        *,
        max_open: int,
        expected_size: Callable[[int], int | None],
    ) -> None:
        """
        Args:
            max_open: most local copies of shards that this process holds open.
            expected_size: the number of samples that a shard must have; None if it is not known yet.
        """
        self._shards, self._kind, self._cache = shards, kind, cache
        self._expected_size = expected_size
        self._lock = threading.Lock()
        self._open: RecentlyUsed[int, _OpenShard] = RecentlyUsed(max_open)
        self._tables: RecentlyUsed[int, Sequence[Any]] = RecentlyUsed(_TABLES_PER_OPEN_SHARD * max_open)
        self._shard_locks: dict[int, threading.Lock] = {}
        """Shards whose table, or whole content, a thread is reading from the store."""
        self._lengths: RecentlyUsed[int, int] = RecentlyUsed(_TABLES_PER_OPEN_SHARD * max_open)
        self._damaged: set[int] = set()
        self._pool = ThreadPoolExecutor(_RANGE_THREADS, "shoal-shard-range")
        self._requests: dict[tuple[int, int], Future[Any]] = {}
        """Samples that are being read, by place."""
        self._reads_samples = True
        """False if nothing was read here since `request_ahead` was last called."""
        self._is_closed = False

    def read(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        """Read the samples at these places: (shard, number in the shard). Those in the store are requested together.

        Raises:
            DataError: a shard cannot be read, is damaged, or has another number of samples than expected.
        """
        self._reads_samples = True
        if len(places) > 1:
            self._request(places)
        return [
            request.result() if (request := self._requests.pop(place, None)) is not None else self._read_sample(*place)
            for place in places
        ]

    def request_ahead(self, places: Sequence[tuple[int, int]]) -> None:
        """Request the samples that are read next, if they are in the store.

        Request nothing if the samples of the last call were not read here, since then other processes read them.
        """
        for request in self._requests.values():
            request.cancel()
        self._requests.clear()
        if self._reads_samples:
            self._reads_samples = False
            self._request(places)

    def _request(self, places: Sequence[tuple[int, int]]) -> None:
        remote = {shard for shard in {shard for shard, _ in places} if self._open_local(shard) is None}
        for place in places:
            if place[0] in remote and place not in self._requests:
                self._requests[place] = self._pool.submit(self._read_sample, *place)

    def _read_sample(self, shard: int, number: int) -> Any:
        return self._open_shard(shard)[number]

    def count_samples(self, shard: int) -> int:
        return len(self._open_shard(shard))

    def is_local(self, shard: int) -> bool:
        """Return True if nothing has to be fetched for this shard."""
        name = self._shards.name(shard)
        return not _is_remote(name) or self._cache.has(name)

    def fetch(self, shard: int, keep: Collection[int] = (), *, patience_s: float = _PATIENCE_S) -> NoClaim | None:
        """Fetch the whole shard into the cache. Return None if it is in the cache now, else why it is not.

        Args:
            keep: shards that must not be deleted to make room.
            patience_s: time for which requests to a store that does not answer are repeated.

        Raises:
            DataError: the store fails for good, or the cache cannot be written.
        """
        name = self._shards.name(shard)
        num_bytes = self._find_length(shard, patience_s)
        claim = self._cache.claim(name, num_bytes, [self._shards.name(kept_shard) for kept_shard in keep])
        if isinstance(claim, NoClaim):
            return claim
        try:
            for start in range(0, num_bytes, BLOCK_BYTES):
                if self._is_closed:
                    self._cache.abandon(claim)
                    return NoClaim.FULL
                claim.write(start, self._read_range(name, start, min(start + BLOCK_BYTES, num_bytes), patience_s))
        except OSError as error:
            self._cache.abandon(claim)
            if error.errno == errno.ENOSPC:
                return NoClaim.FULL
            raise CacheError(
                f"cache_dir {self._cache.directory} cannot be written: {error}. Set another cache_dir."
            ) from error
        except BaseException:
            self._cache.abandon(claim)
            raise
        self._cache.commit(claim)
        return None

    def close(self) -> None:
        """Close all shards. A fetch on another thread ends after its current range."""
        self._is_closed = True
        for shard in self._open.clear():
            shard.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _open_shard(self, shard: int) -> Sequence[Any]:
        return self._open_local(shard) or self._open_by_ranges(shard) or self._fetch_and_open(shard)

    def _open_local(self, shard: int) -> Sequence[Any] | None:
        if (opened := self._open.get(shard)) is not None:
            return opened.samples
        name = self._shards.name(shard)
        if not _is_remote(name):
            path = Path(name.removeprefix(_FILE)).expanduser()
            return self._keep_open(shard, _OpenShard(self._check_size(shard, self._kind.open_file(path, name)), None))
        file = self._cache.open_shard(name)
        if file is None:
            return None
        try:
            samples = self._check_size(shard, self._kind.open_file(file.path, name))
        except ShardSizeError:
            file.close()
            raise
        except DataError:
            file.close()
            if shard in self._damaged:  # it was fetched again and is the same, so the store's file is damaged
                raise
            self._damaged.add(shard)
            self._cache.discard(name)
            return None
        return self._keep_open(shard, _OpenShard(samples, file))

    def _keep_open(self, shard: int, opened: _OpenShard) -> Sequence[Any]:
        self._tables.pop(shard)
        for dropped in self._open.put(shard, opened):
            dropped.close()
        return opened.samples

    def _open_by_ranges(self, shard: int) -> Sequence[Any] | None:
        with self._lock_shard(shard):
            if (samples := self._tables.get(shard)) is not None:
                return samples
            name = self._shards.name(shard)
            stored = StoredShard(name, partial(self._find_length, shard), partial(self._read_range, name))
            samples = self._kind.open_by_ranges(stored)
            if samples is not None:
                self._tables.put(shard, self._check_size(shard, samples))
            return samples

    def _fetch_and_open(self, shard: int) -> Sequence[Any]:
        """Fetch the shard, or wait for the thread or process that does."""
        full_since_mono: float | None = None
        pause_s = _POLL_S[0]
        with self._lock_shard(shard):
            while (samples := self._open_local(shard)) is None:
                refusal = self.fetch(shard)
                if refusal is NoClaim.FULL:
                    full_since_mono = full_since_mono or time.monotonic()
                    if (oldest := self._open.pop_oldest()) is not None:
                        oldest.close()
                    if time.monotonic() - full_since_mono > _ROOM_PATIENCE_S:
                        raise self._make_room_error(shard)
                if refusal is not None:
                    time.sleep(pause_s)
                    pause_s = min(_POLL_S[1], 1.2 * pause_s)
            return samples

    @contextmanager
    def _lock_shard(self, shard: int) -> Iterator[None]:
        """Let only one thread ask the store for a shard."""
        with self._lock:
            lock = self._shard_locks.setdefault(shard, threading.Lock())
        with lock:
            yield
            with self._lock:
                self._shard_locks.pop(shard, None)

    def _make_room_error(self, shard: int) -> CacheError:
        return CacheError(
            f"cache_dir {self._cache.directory} has no room for {self._shards.name(shard)} of "
            f"{self._find_length(shard):,} bytes: all of cache_bytes={self._cache.max_bytes:,} is in use, or the disk "
            "is full. Raise cache_bytes, or lower block_shards."
        )

    def _check_size(self, shard: int, samples: Sequence[Any]) -> Sequence[Any]:
        expected = self._expected_size(shard)
        if expected is not None and len(samples) != expected:
            raise ShardSizeError(
                f"{self._shards.name(shard)} has {len(samples):,} samples, and {expected:,} are expected there: by "
                "an index, by samples_per_shard, or as in the first shard. Name the index of the data set, or shards "
                "of one size; if only the last shard is smaller, give num_samples."
            )
        return samples

    def _find_length(self, shard: int, patience_s: float = _PATIENCE_S) -> int:
        length = self._shards.num_bytes(shard) or self._lengths.get(shard)
        if length is None:
            name = self._shards.name(shard)
            length = _ask_store(name, lambda: remote_size(name, patience_s=patience_s))
            self._lengths.put(shard, length)
        return length

    def _read_range(self, name: str, start: int, end: int, patience_s: float = _PATIENCE_S) -> bytes:
        data = _ask_store(name, lambda: read_range(name, start, end, patience_s=patience_s))
        if len(data) != end - start:
            raise MissingTextError(
                f"{name} cannot be read: {end - start:,} bytes were requested at {start:,}, and {len(data):,} came. "
                "The shard may have changed, or the index may be an old one."
            )
        return data


def read_file(name: str) -> bytes:
    """Read a small file, of a store or of this node. Raises MissingTextError if it cannot be read."""
    if not _is_remote(name):
        try:
            return Path(name.removeprefix(_FILE)).expanduser().read_bytes()
        except OSError as error:
            raise MissingTextError(f"{name} cannot be read: {error.strerror or error}. Check the path.") from error
    num_bytes = _ask_store(name, lambda: remote_size(name, patience_s=_PATIENCE_S))
    return _ask_store(name, lambda: read_range(name, 0, num_bytes, patience_s=_PATIENCE_S))


def _is_remote(name: str) -> bool:
    return is_url(name) and not name.startswith(_FILE)


def _ask_store(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except FileNotFoundError as error:
        raise MissingTextError(
            f"{name} does not exist. Check the pattern and the number of the shards, or write the shard again."
        ) from error
