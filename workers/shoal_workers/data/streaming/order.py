"""Which sample stands at each position of a run over shards: shards are shuffled, then the samples of each block of
consecutive shards. A pure function of (seed, position), so there is no state, and no list of samples or shards.

    epoch      0                                              1
    shards     7 2 9 | 0 5 1 | 8 3 4 6                        another permutation
    blocks     0     | 1     | 2                              `block_shards` shards each, about
    positions  samples of 7, 2, 9 shuffled | of 0, 5, 1 | ...

So while a block is read, its shards are all that is needed, and which ones come next is known. Shards of one size take
no memory, however many there are; shards whose sizes are listed take 8 bytes each, and 16 more in each of two epochs.
Called by `StreamedShards` and its prefetching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shoal_workers.contract.batch_partition import epoch_key, permute, unpermute
from shoal_workers.data.concatenation import locate
from shoal_workers.data.permutation import permuted

_SHARDS = 0x53545245
"""Sets the order of the shards apart from that of a data set with the same seed."""
_TABLES = 2
_BLOCKS = 8
"""Epochs and blocks that are kept: prefetching is ahead of training."""


class EqualSizes:
    """All shards have equally many samples, and only the last one may have fewer.

    A sample's number is that of its shard's first sample, and its place there.
    """

    def __init__(self, num_shards: int, samples_per_shard: int, num_samples: int | None = None) -> None:
        """Raises ValueError if so many samples are not in so many shards."""
        full = num_shards * samples_per_shard
        self.num_shards, self.samples_per_shard = num_shards, samples_per_shard
        self.num_samples = full if num_samples is None else num_samples
        self.missing = full - self.num_samples
        """Samples that the last shard has fewer than the others."""
        if num_shards < 1 or samples_per_shard < 1 or not 0 <= self.missing < samples_per_shard:
            raise ValueError(
                f"{num_shards:,} shards with samples_per_shard={samples_per_shard:,} have {full:,} samples, or fewer "
                f"if the last one is smaller, and num_samples={num_samples} does not fit. Correct one of the three."
            )

    def first(self, shard: int) -> int:
        """Return the number of its first sample."""
        return shard * self.samples_per_shard

    def size(self, shard: int) -> int:
        return self.samples_per_shard - (self.missing if shard == self.num_shards - 1 else 0)

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the shard, and the place in it."""
        return divmod(sample, self.samples_per_shard)

    def slots(self, key: int) -> _EqualSlots:
        return _EqualSlots(self, key)


class _EqualSlots:
    """The shards in the order of one epoch."""

    def __init__(self, sizes: EqualSizes, key: int) -> None:
        self._sizes, self._key = sizes, key
        self._smaller = unpermute(sizes.num_shards - 1, sizes.num_shards, key) if sizes.missing else sizes.num_shards
        """The slot of the last shard, if it is smaller."""

    def shard(self, slot: int) -> int:
        return permute(slot, self._sizes.num_shards, self._key)

    def start(self, slot: int) -> int:
        """How many samples the slots before it have; of all of them for the number of slots."""
        return slot * self._sizes.samples_per_shard - (self._sizes.missing if slot > self._smaller else 0)

    def near(self, start: int) -> int:
        """A slot near the one that has the sample at this place of the epoch."""
        return start // self._sizes.samples_per_shard


class ListedSizes:
    """The sizes of an index, with the methods of EqualSizes. Shards without samples are allowed."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Raises ValueError if there is no sample."""
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self.num_shards, self.num_samples = len(sizes), int(self._starts[-1])
        if not self.num_samples:
            raise ValueError(f"the {self.num_shards:,} shards have no sample. Name shards that have some.")

    def first(self, shard: int) -> int:
        return int(self._starts[shard])

    def size(self, shard: int) -> int:
        return int(self.sizes[shard])

    def locate(self, sample: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return shard, sample - int(self._starts[shard])

    def slots(self, key: int) -> _ListedSlots:
        return _ListedSlots(self, key)


class _ListedSlots:
    def __init__(self, sizes: ListedSizes, key: int) -> None:
        self._shards = permuted(np.arange(sizes.num_shards, dtype=np.uint64), sizes.num_shards, key).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(sizes.sizes[self._shards])])

    def shard(self, slot: int) -> int:
        return int(self._shards[slot])

    def start(self, slot: int) -> int:
        return int(self._starts[slot])

    def near(self, start: int) -> int:
        return max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)


ShardSizes = EqualSizes | ListedSizes


@dataclass(frozen=True, slots=True)
class Block:
    """The shards between whose samples the order does not distinguish."""

    epoch: int
    number: int
    """In the epoch."""
    shards: tuple[int, ...]
    start: int
    """Samples of the epoch before it."""
    ends: tuple[int, ...]
    """Samples of the block up to the last one of each shard."""
    key: int


class BlockOrder:
    """The order of a run over all epochs. Any thread."""

    def __init__(self, sizes: ShardSizes, block_shards: int) -> None:
        self.sizes = sizes
        self.num_blocks = -(-sizes.num_shards // block_shards)
        """In an epoch. They differ by one shard at most."""
        slots: Callable[[int], _EqualSlots | _ListedSlots] = sizes.slots
        self._slots = lru_cache(_TABLES)(slots)
        self._block = lru_cache(_BLOCKS)(self._made)

    def samples_at(self, positions: range, seed: int) -> list[int]:
        """Return the numbers of the samples at these positions of the run."""
        samples: list[int] = []
        at = positions.start
        while at < positions.stop:
            block, offset = self._block_at(at, seed)
            num = min(positions.stop - at, block.ends[-1] - offset)
            samples += self._samples(block, offset, num)
            at += num
        return samples

    def block_at(self, position: int, seed: int) -> Block:
        return self._block_at(position, seed)[0]

    def blocks_from(self, block: Block, seed: int) -> Iterator[Block]:
        """This block and those after it, over all epochs, without end."""
        epoch, number = block.epoch, block.number
        while True:
            yield self._block(epoch, number, seed)
            number += 1
            if number == self.num_blocks:
                epoch, number = epoch + 1, 0

    def _block_at(self, position: int, seed: int) -> tuple[Block, int]:
        epoch, offset = divmod(position, self.sizes.num_samples)
        slots = self._slots(_epoch(seed, epoch))
        slot = min(slots.near(offset), self.sizes.num_shards - 1)
        number = ((slot + 1) * self.num_blocks - 1) // self.sizes.num_shards
        while slots.start(self._first_slot(number)) > offset:
            number -= 1
        while slots.start(self._first_slot(number + 1)) <= offset:
            number += 1
        block = self._block(epoch, number, seed)
        return block, offset - block.start

    def _first_slot(self, block: int) -> int:
        return block * self.sizes.num_shards // self.num_blocks

    def _made(self, epoch: int, number: int, seed: int) -> Block:
        key = _epoch(seed, epoch)
        slots = self._slots(key)
        first, end = self._first_slot(number), self._first_slot(number + 1)
        start = slots.start(first)
        return Block(
            epoch,
            number,
            tuple(slots.shard(slot) for slot in range(first, end)),
            start,
            tuple(slots.start(slot + 1) - start for slot in range(first, end)),
            epoch_key(key, number + 1),
        )

    def _samples(self, block: Block, offset: int, num: int) -> list[int]:
        places: Any = permuted(np.arange(offset, offset + num, dtype=np.uint64), block.ends[-1], block.key)
        samples = []
        for place in places.tolist():
            at, number = locate(block.ends, place)
            samples.append(self.sizes.first(block.shards[at]) + number)
        return samples


def _epoch(seed: int, epoch: int) -> int:
    return epoch_key(seed ^ _SHARDS, epoch)
