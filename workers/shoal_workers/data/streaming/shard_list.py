"""Which shards there are: a pattern, a list, the index of a data set, or a function of the number. No list is made of a
pattern or a function, so millions of shards take no memory.

    "s3://bucket/c4/{00..99}/shard-{0000..9999}.tar"     1,000,000 shards; the last range counts fastest
    ["https://host/a.mds", "https://host/b.mds"]
    "s3://bucket/c4/index.json"                          read once: MDS and litdata write one
    lambda number: f"https://host/{number // 1000}/{number}.bin"      with num_shards

Called by `StreamedShards`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_workers.data.errors import MissingTextError
from shoal_workers.data.shard_formats import IndexedShard, ShardFormat, find_shard_format

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def _unknown(shard: int) -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class ShardList:
    """The shards of a data set, numbered from 0 on."""

    num_shards: int
    name: Callable[[int], str]
    identity: str
    """Another one for other shards. The directory that all are in does not count: a copy elsewhere is the same data."""
    num_bytes: Callable[[int], int | None] = _unknown
    """None if the store says it."""
    sizes: tuple[int, ...] | None = None
    """Samples of each shard, if there is an index."""


def from_pattern(pattern: str) -> ShardList:
    """Raises ValueError if a range of the pattern has no number."""
    ranges = tuple((int(low), int(high), len(low)) for low, high in _RANGE.findall(pattern))
    for low, high, _ in ranges:
        if high < low:
            raise ValueError(f"shards={pattern!r}: the range {low}..{high} has no number. Write the smaller one first.")
    texts = tuple(_RANGE.split(pattern)[::3])
    folder = texts[0].rpartition("/")[0]
    return ShardList(
        math.prod(high - low + 1 for low, high, _ in ranges),
        _Pattern(texts, ranges),
        pattern.removeprefix(folder) if ranges else "",
    )


@dataclass(frozen=True, slots=True)
class _Pattern:
    texts: tuple[str, ...]
    """Before, between and after the ranges."""
    ranges: tuple[tuple[int, int, int], ...]
    """First and last number, and how many digits there are at least."""

    def __call__(self, shard: int) -> str:
        numbers = []
        for low, high, width in reversed(self.ranges):
            shard, at = divmod(shard, high - low + 1)
            numbers.append(f"{low + at:0{width}d}")
        return self.texts[0] + "".join(
            number + text for number, text in zip(reversed(numbers), self.texts[1:], strict=True)
        )


def from_names(names: Sequence[str]) -> ShardList:
    """Raises ValueError if there is none."""
    if not names:
        raise ValueError("shards=[]: there is no shard. Name at least one.")
    folder = _folder(names)
    return ShardList(len(names), names.__getitem__, _digest(name.removeprefix(folder) for name in names))


def from_index(url: str, shards: Sequence[IndexedShard]) -> ShardList:
    """`shards`: their names are relative to the index. Raises MissingTextError if there is none."""
    if not shards:
        raise MissingTextError(f"{url} names no shard. Write the index again.")
    index = _Index(url.partition("?")[0].rpartition("/")[0], tuple(shards))
    return ShardList(
        len(shards),
        index.name,
        _digest(f"{shard.name} {shard.num_bytes} {shard.num_samples}" for shard in shards),
        index.num_bytes,
        tuple(shard.num_samples for shard in shards),
    )


@dataclass(frozen=True, slots=True)
class _Index:
    folder: str
    shards: tuple[IndexedShard, ...]

    def name(self, shard: int) -> str:
        return f"{self.folder}/{self.shards[shard].name}"

    def num_bytes(self, shard: int) -> int | None:
        """An index of LitData does not say how long a compressed file is."""
        shard_info = self.shards[shard]
        return None if find_shard_format(shard_info.name) is ShardFormat.LITDATA else shard_info.num_bytes


def from_function(name: Callable[[int], str], num_shards: int | None) -> ShardList:
    """Raises ValueError without the number of shards."""
    if num_shards is None or num_shards < 1:
        raise ValueError(f"num_shards={num_shards}: shards named by a function need their number. Give num_shards.")
    folder = _folder([name(0), name(num_shards - 1)])
    ends = [name(number).removeprefix(folder) for number in (0, num_shards - 1)]
    return ShardList(num_shards, name, f"{num_shards} {ends}")


def _folder(names: Sequence[str]) -> str:
    """Return the directory that all of them are in."""
    low, high = min(names), max(names)
    same = next((at for at, letter in enumerate(low) if letter != high[at]), len(low))
    return low[:same].rpartition("/")[0]


def _digest(texts: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()
