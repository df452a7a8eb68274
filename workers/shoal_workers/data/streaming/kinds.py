"""How the samples of a shard are found: in a whole file on disk, and if the format has a table of places, also by
ranges of a file that is still in the store, so that the first batches need not wait for whole shards.

    FixedRecords    all samples have equally many bytes: numpy arrays, tokens
    StoredFormat    the formats of `shard_formats`; by ranges only MDS, whose shards begin with their table

Called by `reading`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

from shoal_workers.data.errors import MissingTextError


class StoredShard(Protocol):
    """A file in the store."""

    name: str

    @property
    def num_bytes(self) -> int: ...

    def read(self, start: int, end: int) -> bytes:
        """From `start` up to `end`. Raises MissingTextError if the store fails for good, or has fewer bytes."""


class ShardKind(Protocol):
    """One way of reading shards. Any thread."""

    @property
    def identity(self) -> str:
        """Another one whenever the samples would be others."""

    def opened(self, path: Path, name: str) -> Sequence[Any]:
        """`name`: the one in the store. Raises DataError if the file is damaged."""

    def by_ranges(self, shard: StoredShard) -> Sequence[Any] | None:
        """None: a shard of this kind has to be read whole."""


class FixedRecords:
    """Samples of `record_bytes` bytes, one after the other, as `bytes`."""

    def __init__(self, record_bytes: int, *, header_bytes: int = 0) -> None:
        """`header_bytes`: what each shard begins with, before its first sample."""
        if record_bytes < 1 or header_bytes < 0:
            raise ValueError(
                f"FixedRecords({record_bytes}, header_bytes={header_bytes}): a record has at least one byte."
            )
        self.record_bytes, self.header_bytes = record_bytes, header_bytes

    @property
    def identity(self) -> str:
        return f"records of {self.record_bytes} after {self.header_bytes}"

    def opened(self, path: Path, name: str) -> Sequence[bytes]:
        try:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # the second: it is empty
            raise MissingTextError(
                f"{name} cannot be read: {error}. Check the path, or write the shard again."
            ) from error
        return _Records(self, len(content), lambda start, end: content[start:end], name)

    def by_ranges(self, shard: StoredShard) -> Sequence[bytes]:
        return _Records(self, shard.num_bytes, shard.read, shard.name)


class _Records(Sequence[bytes]):
    def __init__(self, kind: FixedRecords, num_bytes: int, read: Callable[[int, int], bytes], name: str) -> None:
        self._kind, self._read = kind, read
        self._num_samples, rest = divmod(max(0, num_bytes - kind.header_bytes), kind.record_bytes)
        if rest:
            raise MissingTextError(
                f"{name} has {num_bytes:,} bytes, which are not whole records of {kind.record_bytes:,} bytes after a "
                f"header of {kind.header_bytes:,}. Correct record_bytes or header_bytes, or write the shard again."
            )

    def __len__(self) -> int:
        return self._num_samples

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        start = self._kind.header_bytes + index * self._kind.record_bytes
        return self._read(start, start + self._kind.record_bytes)
