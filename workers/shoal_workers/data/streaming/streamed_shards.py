"""`StreamedShards`: trains on shards in an object store or on a server, without any preparation.

It is a data set by number, which a task returns from `build_dataset` or a loop gives to `run.batches`; it defines the
order of its samples (`samples_at`). There is no state: after a kill, with another number of ranks and in another
cluster the same samples are read at the same positions. Each process reads and prefetches, over a cache that all
processes of a node share.
Hidden here: the size of shards that nobody has declared, the data set's identity, and processes that fork.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from shoal_workers.data.shard_formats import ShardFormat, read_index
from shoal_workers.data.streaming import shard_list
from shoal_workers.data.streaming.cache import ShardCache
from shoal_workers.data.streaming.kinds import ShardKind, StoredFormat
from shoal_workers.data.streaming.order import Block, BlockOrder, EqualSizes, ListedSizes, ShardSizes
from shoal_workers.data.streaming.prefetch import PATIENCE_S, Prefetching
from shoal_workers.data.streaming.reading import ShardReader, read_file
from shoal_workers.data.streaming.shard_list import ShardList

DEFAULT_CACHE_BYTES = 32 << 30
_BLOCKS_AHEAD = 2
_EXTRA_OPEN = 4
"""Local copies that are open in addition to those of one block."""
_INDEX = "index.json"

Shards = str | Sequence[str] | Callable[[int], str]


class StreamedShards(Dataset[Any]):
    """Random access to the samples, and their order."""

    def __init__(
        self,
        shards: Shards,
        kind: ShardKind | ShardFormat | None = None,
        *,
        decode: Callable[[Any], Any] | None = None,
        num_shards: int | None = None,
        samples_per_shard: int | None = None,
        num_samples: int | None = None,
        block_shards: int = 16,
        cache_dir: str | Path | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        num_threads: int = 4,
    ) -> None:
        """
        Args:
            shards: a URL pattern with ranges such as {000..999}, a list of URLs, the URL of an index.json, or a
                function of a shard's number. Paths of this node are read where they are.
            kind: a format, or FixedRecords. Default: the format that the names of the shards say.
            decode: turns a sample of a shard into the sample for training. Not part of the identity of the data.
            num_shards: of a function.
            samples_per_shard: of each shard, of which only the last one may have fewer. Default: as many as the first
                one has, which is then asked for.
            num_samples: of all shards, if the last one is smaller.
            block_shards: consecutive shards whose samples are shuffled together. More of them shuffle better, and need
                more room: a step may need all shards of a block.
            cache_dir: on a local disk, shared by all processes of a node. Default: ~/.cache/shoal/shards.
            cache_bytes: of all that is kept there, whichever data set has fetched it. Room for the shards of three
                blocks lets a block be fetched while another one is read.
            num_threads: threads of this process that fetch shards ahead of time.

        Raises:
            ValueError: the arguments do not fit together; the message names them.
            DataError: the first shard cannot be read, or the cache cannot be used.
        """
        if block_shards < 1 or num_threads < 1:
            raise ValueError(f"block_shards={block_shards}, num_threads={num_threads}: each is at least 1.")
        self._list, index = _list_shards(shards, num_shards)
        self._kind: ShardKind = StoredFormat(kind, index) if kind is None or isinstance(kind, ShardFormat) else kind
        self._decode = decode
        self._settings = _Settings(
            Path(cache_dir).expanduser() if cache_dir is not None else Path.home() / ".cache" / "shoal" / "shards",
            cache_bytes,
            block_shards,
            num_threads,
        )
        self._reader: _Reader | None = None
        self._sizes: ShardSizes | None = None  # not known while the samples of the first shard are counted
        self._sizes = self._find_sizes(samples_per_shard, num_samples)
        self._order = BlockOrder(self._sizes, block_shards)
        described = [self._list.identity, self._list.num_shards, len(self), block_shards, self._kind.identity]
        self.content_hash = hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        assert self._sizes is not None
        return self._sizes.num_samples

    def __getitem__(self, index: int) -> Any:
        """Return one sample. Raises DataError if its shard cannot be read, is damaged or has an unexpected size."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read several samples; the ranges of shards that are not here yet are requested together."""
        assert self._sizes is not None
        for index in indices:
            if not 0 <= index < self._sizes.num_samples:
                raise IndexError(f"sample {index} of {self._sizes.num_samples}")
        samples = self._local_reader().shards.read([self._sizes.locate(index) for index in indices])
        return samples if self._decode is None else [self._decode(sample) for sample in samples]

    def samples_at(self, positions: range, seed: int) -> list[int]:
        """Return the samples at these positions of the run, which are expected to be read next.

        The shards after them are fetched ahead.
        """
        samples = self._order.samples_at(positions, seed)
        if samples:
            assert self._sizes is not None
            reader = self._local_reader()
            reader.shards.request_ahead([self._sizes.locate(sample) for sample in samples])
            reader.move(self._order, self._order.block_at(positions.start, seed), seed)
        return samples

    def close(self) -> None:
        """Release the shards of the cache, and wait for the threads, which end with their present request.

        A later call opens everything again.
        """
        if self._reader is not None:
            self._reader.close()
            self._reader.join()
            self._reader = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_reader", "_order")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reader = None
        assert self._sizes is not None
        self._order = BlockOrder(self._sizes, self._settings.block_shards)

    def _local_reader(self) -> _Reader:
        """Return the reader of this process: after a fork, threads and locks belong to the parent."""
        if self._reader is None or self._reader.pid != os.getpid():
            self._reader = _Reader(self._list, self._kind, self._settings, self._expected_size)
            weakref.finalize(self, self._reader.close)
        return self._reader

    def _expected_size(self, shard: int) -> int | None:
        return None if self._sizes is None else self._sizes.size(shard)

    def _find_sizes(self, samples_per_shard: int | None, num_samples: int | None) -> ShardSizes:
        if self._list.sizes is not None:
            if samples_per_shard is not None or num_samples is not None:
                raise ValueError(
                    f"samples_per_shard={samples_per_shard}, num_samples={num_samples}, but the index says how many "
                    "samples each shard has. Leave both out."
                )
            return ListedSizes(self._list.sizes)
        if samples_per_shard is None:
            samples_per_shard = self._local_reader().shards.count_samples(0)
        return EqualSizes(self._list.num_shards, samples_per_shard, num_samples)


class _Settings:
    def __init__(self, directory: Path, cache_bytes: int, block_shards: int, num_threads: int) -> None:
        self.directory, self.cache_bytes = directory, cache_bytes
        self.block_shards, self.num_threads = block_shards, num_threads


class _Reader:
    """The open shards and the prefetching threads of one process."""

    def __init__(
        self, shards: ShardList, kind: ShardKind, settings: _Settings, expected_size: Callable[[int], int | None]
    ) -> None:
        self.pid = os.getpid()
        self.shards = ShardReader(
            shards,
            kind,
            ShardCache(settings.directory, settings.cache_bytes),
            max_open=settings.block_shards + _EXTRA_OPEN,
            expected_size=expected_size,
        )
        self._prefetching = Prefetching(
            lambda shard, keep: self.shards.fetch(shard, keep, patience_s=PATIENCE_S),
            self.shards.is_local,
            settings.num_threads,
        )
        self._block: tuple[int, int, int] | None = None

    def move(self, order: BlockOrder, block: Block, seed: int) -> None:
        key = (block.epoch, block.number, seed)
        if key != self._block:
            self._block = key
            self._prefetching.move(
                [next_block.shards for next_block in islice(order.blocks_from(block, seed), 1 + _BLOCKS_AHEAD)]
            )

    def close(self) -> None:
        if self.pid == os.getpid():
            self._prefetching.close()
            self.shards.close()

    def join(self) -> None:
        if self.pid == os.getpid():
            self._prefetching.join()


def _list_shards(shards: Shards, num_shards: int | None) -> tuple[ShardList, bytes | None]:
    """Return the shards, and the content of the index if there is one."""
    if callable(shards):
        return shard_list.from_function(shards, num_shards), None
    if num_shards is not None:
        raise ValueError(f"num_shards={num_shards}, but the pattern or the list says how many there are. Leave it out.")
    if not isinstance(shards, str):
        return shard_list.from_names(shards), None
    if not shards.partition("?")[0].endswith(_INDEX):
        return shard_list.from_pattern(shards), None
    index = read_file(shards)
    return shard_list.from_index(shards, read_index(shards, index)), index
