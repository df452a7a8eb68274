"""Reads samples of shards in a store: from the local copy if there is one, by a range of the file if not, and as the
last resort by fetching the whole shard at once.

    sample of a shard --- open in this process? ------------------------------ read
                      |-- whole in the cache? -> open, verify its size ------- read
                      |-- the format has a table of places? -> range requests  read
                      `-- fetch the shard, or wait for the process that does -> open, verify its size -> read

`fetch` is also what prefetching calls. Names that are no URL are files of this node, which are opened where they are.
A shard whose number of samples is not the expected one ends in an error, however it is opened. Called by
`StreamedShards`.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shoal_workers.data.errors import CacheError, DataError, MissingTextError, ShardSizeError
from shoal_workers.data.remote import BLOCK_BYTES, is_url, read_range, remote_size
from shoal_workers.data.streaming.cache import Held, NoClaim, ShardCache
from shoal_workers.data.streaming.kinds import ShardKind, StoredShard
from shoal_workers.data.streaming.shard_list import ShardList

_PATIENCE_S = 300.0
"""For so long a store that is down holds up training before the job fails."""
_ROOM_PATIENCE_S = 60.0
_POLL_S = (0.01, 0.2)
"""First and last pause between two looks at a shard that another process fetches."""
_RANGE_THREADS = 32
_KNOWN_TABLES = 4
"""Tables of shards that are read by ranges, as a multiple of the open shards."""
_FILE = "file://"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Open:
    samples: Sequence[Any]
    held: Held | None
    """None for a file that is not in the cache."""


class ShardReading:
    """Any thread, of one process."""

    def __init__(
        self,
        shards: ShardList,
        kind: ShardKind,
        cache: ShardCache,
        *,
        most_open: int,
        size_of: Callable[[int], int | None],
    ) -> None:
        """
        Args:
            most_open: shards of which this process holds the local copies.
            size_of: the number of samples that a shard must have; None if it is not known yet.
        """
        self._shards, self._kind, self._cache = shards, kind, cache
        self._most_open = most_open
        self._size_of = size_of
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._tables: OrderedDict[int, Sequence[Any]] = OrderedDict()
        self._asking: dict[int, threading.Lock] = {}
        """Shards of which a thread asks for the table, or for all of it."""
        self._lengths: dict[int, int] = {}
        self._damaged: set[int] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._expected: dict[tuple[int, int], Future[Any]] = {}
        self._reads_here = True
        """What was expected the last time was also asked for."""
        self._is_closed = False

    def samples(self, wanted: Sequence[tuple[int, int]]) -> list[Any]:
        """The samples at these places: (shard, number in the shard). Those that are not here are asked for together.

        Raises:
            DataError: a shard cannot be read, is damaged, or has another number of samples than expected.
        """
        self._reads_here = True
        if len(wanted) > 1:
            self._ask_for(wanted)
        return [
            self._sample(*place) if (future := self._expected.pop(place, None)) is None else future.result()
            for place in wanted
        ]

    def expect(self, wanted: Sequence[tuple[int, int]]) -> None:
        """These samples will be wanted next, perhaps one after the other: those that are not here are asked for now.

        If other processes read what this one expects, only the first ones are asked for in vain.
        """
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()
        if self._reads_here:
            self._reads_here = False
            self._ask_for(wanted)

    def _ask_for(self, wanted: Sequence[tuple[int, int]]) -> None:
        local = {shard: self._local(shard) is not None for shard in {shard for shard, _ in wanted}}
        for place in wanted:
            if not local[place[0]] and place not in self._expected:
                self._expected[place] = self._threads().submit(self._sample, *place)

    def _sample(self, shard: int, at: int) -> Any:
        return (self._local(shard) or self._by_ranges(shard) or self._fetched(shard))[at]

    def num_samples(self, shard: int) -> int:
        """How many a shard has."""
        return len(self._local(shard) or self._by_ranges(shard) or self._fetched(shard))

    def has(self, shard: int) -> bool:
        """Return whether nothing is to be fetched for this shard."""
        name = self._shards.name(shard)
        return not _is_stored(name) or self._cache.has(name)

    def fetch(self, shard: int, keep: Collection[int] = (), *, patience_s: float = _PATIENCE_S) -> NoClaim | None:
        """Fetches the whole shard into the cache; or says why not. None if it is there now.

        Args:
            keep: shards that are not deleted for it.
            patience_s: for how long a store that does not answer is asked again.

        Raises:
            DataError: the store fails for good, or the cache cannot be written.
        """
        name = self._shards.name(shard)
        num_bytes = self._length(shard, patience_s)
        claim = self._cache.claim(name, num_bytes, [self._shards.name(kept_name) for kept_name in keep])
        if isinstance(claim, NoClaim):
            return claim
        try:
            for start in range(0, num_bytes, BLOCK_BYTES):
                if self._is_closed:
                    self._cache.abandon(claim)
                    return NoClaim.FULL
                claim.write(start, self._read(name, start, min(start + BLOCK_BYTES, num_bytes), patience_s))
        except OSError as error:
            self._cache.abandon(claim)
            if error.errno == errno.ENOSPC:
                return NoClaim.FULL
            raise CacheError(
                f"cache_dir {self._cache.directory} cannot be written: {error}. Set another one."
            ) from error
        except BaseException:
            self._cache.abandon(claim)
            raise
        self._cache.commit(claim)
        return None

    def close(self) -> None:
        """Gives everything back; a fetch on another thread ends with its present range."""
        self._is_closed = True
        with self._lock:
            for shard in self._open.values():
                if shard.held is not None:
                    shard.held.close()
            self._open.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _local(self, shard: int) -> Sequence[Any] | None:
        with self._lock:
            if (known := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return known.samples
        name = self._shards.name(shard)
        if not _is_stored(name):
            path = Path(name.removeprefix(_FILE)).expanduser()
            return self._kept(shard, _Open(self._checked(shard, self._kind.opened(path, name)), None))
        held = self._cache.opened(name)
        if held is None:
            return None
        try:
            samples = self._checked(shard, self._kind.opened(held.path, name))
        except ShardSizeError:
            held.close()
            raise
        except DataError:
            held.close()
            if shard in self._damaged:  # it was fetched again, and is the same: the store has it so
                raise
            self._damaged.add(shard)
            self._cache.discard(name)
            return None
        return self._kept(shard, _Open(samples, held))

    def _kept(self, shard: int, opened: _Open) -> Sequence[Any]:
        with self._lock:
            dropped = [self._open.pop(shard)] if shard in self._open else []
            self._open[shard] = opened
            while len(self._open) > self._most_open:
                dropped.append(self._open.popitem(last=False)[1])
            self._tables.pop(shard, None)
            for dropped_shard in dropped:
                if dropped_shard.held is not None:
                    dropped_shard.held.close()  # a thread that still reads has it mapped
        return opened.samples

    def _by_ranges(self, shard: int) -> Sequence[Any] | None:
        with self._alone(shard):
            with self._lock:
                known = self._tables.get(shard)
            if known is not None:
                return known
            name = self._shards.name(shard)
            stored = StoredShard(name, partial(self._length, shard), partial(self._read, name))
            samples = self._kind.by_ranges(stored)
            if samples is None:
                return None
            self._checked(shard, samples)
            with self._lock:
                self._tables[shard] = samples
                while len(self._tables) > _KNOWN_TABLES * self._most_open:
                    self._tables.popitem(last=False)
        return samples

    def _fetched(self, shard: int) -> Sequence[Any]:
        """Fetches the shard now, or waits for the thread or the process that does."""
        full_since_mono: float | None = None
        pause_s = _POLL_S[0]
        with self._alone(shard):
            while True:
                if (samples := self._local(shard)) is not None:
                    return samples
                why = self.fetch(shard)
                if why is NoClaim.FULL:
                    full_since_mono = full_since_mono or time.monotonic()
                    self._let_one_go()
                    if time.monotonic() - full_since_mono > _ROOM_PATIENCE_S:
                        raise self._no_room(shard)
                if why is not None:
                    time.sleep(pause_s)
                    pause_s = min(_POLL_S[1], 1.2 * pause_s)

    @contextmanager
    def _alone(self, shard: int) -> Iterator[None]:
        """Several threads want samples of a shard: one of them asks the store for its table, or for all of it."""
        with self._lock:
            asking = self._asking.setdefault(shard, threading.Lock())
        with asking:
            yield
            with self._lock:
                self._asking.pop(shard, None)

    def _no_room(self, shard: int) -> CacheError:
        return CacheError(
            f"there is no room for {self._shards.name(shard)} of {self._length(shard):,} bytes in cache_dir "
            f"{self._cache.directory}: all of cache_bytes={self._cache.max_bytes:,} is in use, or the disk is full. "
            "Raise cache_bytes, or lower block_shards."
        )

    def _let_one_go(self) -> None:
        with self._lock:
            if self._open and (held := self._open.popitem(last=False)[1].held) is not None:
                held.close()

    def _checked(self, shard: int, samples: Sequence[Any]) -> Sequence[Any]:
        expected = self._size_of(shard)
        if expected is not None and len(samples) != expected:
            raise ShardSizeError(
                f"{self._shards.name(shard)} has {len(samples):,} samples, and {expected:,} are expected there: by "
                "an index, by samples_per_shard, or as in the first shard. Name the index of the data set, or shards "
                "of one size; if only the last shard is smaller, give num_samples."
            )
        return samples

    def _length(self, shard: int, patience_s: float = _PATIENCE_S) -> int:
        known = self._shards.num_bytes(shard) or self._lengths.get(shard)
        if known is None:
            name = self._shards.name(shard)
            known = _stored(name, lambda: remote_size(name, patience_s=patience_s))
            if len(self._lengths) > _KNOWN_TABLES * self._most_open:
                self._lengths.clear()
            self._lengths[shard] = known
        return known

    def _read(self, name: str, start: int, end: int, patience_s: float = _PATIENCE_S) -> bytes:
        data = _stored(name, lambda: read_range(name, start, end, patience_s=patience_s))
        if len(data) != end - start:
            raise MissingTextError(
                f"{name} cannot be read: {end - start:,} bytes were asked for at {start:,}, and {len(data):,} came. "
                "The shard may have changed, or the index may be an old one."
            )
        return data

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_RANGE_THREADS, "shoal-shard-range")
            return self._pool


def whole_file(name: str) -> bytes:
    """The content of a small file, in a store or of this node. Raises MissingTextError if it cannot be read."""
    if not _is_stored(name):
        try:
            return Path(name.removeprefix(_FILE)).expanduser().read_bytes()
        except OSError as error:
            raise MissingTextError(f"{name} cannot be read: {error.strerror or error}. Check the path.") from error
    num_bytes = _stored(name, lambda: remote_size(name, patience_s=_PATIENCE_S))
    return _stored(name, lambda: read_range(name, 0, num_bytes, patience_s=_PATIENCE_S))


def _is_stored(name: str) -> bool:
    return is_url(name) and not name.startswith(_FILE)


def _stored(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except FileNotFoundError as error:
        raise MissingTextError(
            f"{name} does not exist. Check the pattern and the number of the shards, or write the shard again."
        ) from error
