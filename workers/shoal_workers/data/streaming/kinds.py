"""How the samples of a shard are located: in a whole file on disk, or by ranges of a file that is still in the store,
so that the first batches need not wait for whole shards.

    FixedRecords    all samples have equally many bytes: numpy arrays, tokens
    StoredFormat    the formats of `shard_formats`; by ranges only MDS, whose shards begin with a table of samples
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from shoal_workers.data.errors import MissingTextError
from shoal_workers.data.shard_formats import ShardFormat, find_shard_format, open_shard
from shoal_workers.data.shards.mds import MdsShard
from shoal_workers.data.shards.shard import COMPRESSIONS, Samples

_MDS_HEAD_BYTES = 1 << 17
"""Size of the first request: the table of 32,000 samples, and the columns."""


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A file in the store."""

    name: str
    find_length: Callable[[], int]
    """Asks the store, unless the length is known."""
    read: Callable[[int, int], bytes]
    """Reads from a byte up to another. Raises MissingTextError if the store fails for good, or has fewer bytes."""

    @property
    def num_bytes(self) -> int:
        return self.find_length()


class ShardKind(Protocol):
    """One way of reading shards. Any thread."""

    @property
    def identity(self) -> str:
        """Text that differs if the samples of the same shards differ."""

    def open_file(self, path: Path, name: str) -> Sequence[Any]:
        """Open a whole shard; `name` is that in the store. Raises DataError if the file is damaged."""

    def open_by_ranges(self, shard: StoredShard) -> Sequence[Any] | None:
        """Open a shard in the store; None if a shard of this kind has to be read whole."""


class StoredFormat:
    """A format of `shard_formats`, or for each shard the format that its name says."""

    def __init__(self, format: ShardFormat | None = None, index: bytes | None = None) -> None:
        """`index`: the content of the data set's index.json, which LitData needs."""
        self._format, self._index = format, index

    @property
    def identity(self) -> str:
        return str(self._format or "as named")

    def open_file(self, path: Path, name: str) -> Sequence[dict[str, Any]]:
        return open_shard(path, self._format or find_shard_format(_file_name(name)), index=self._index)

    def open_by_ranges(self, shard: StoredShard) -> Sequence[dict[str, Any]] | None:
        name = PurePosixPath(_file_name(shard.name))
        is_mds = (self._format or find_shard_format(name.name)) is ShardFormat.MDS
        if not is_mds or name.suffix in COMPRESSIONS:
            return None
        content = _StoredContent(shard)
        table = MdsShard(Path(shard.name), shard.name, content)
        content.drop_head()
        return table


class _StoredContent:
    """The bytes of a file in a store. Keeps its begin, which the first request reads, until `drop_head`."""

    def __init__(self, shard: StoredShard) -> None:
        self._shard = shard
        self._head = shard.read(0, min(_MDS_HEAD_BYTES, shard.num_bytes))

    def drop_head(self) -> None:
        """The table of contents has been read."""
        self._head = b""

    def __len__(self) -> int:
        return self._shard.num_bytes

    def __getitem__(self, place: slice, /) -> bytes:
        start, end, _ = place.indices(len(self))
        first = max(start, len(self._head))
        return self._head[start:end] + (self._shard.read(first, end) if first < end else b"")


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

    def open_file(self, path: Path, name: str) -> Sequence[bytes]:
        try:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # the second: it is empty
            raise MissingTextError(
                f"{name} cannot be read: {error}. Check the path, or write the shard again."
            ) from error
        return _Records(self, len(content), lambda start, end: content[start:end], name)

    def open_by_ranges(self, shard: StoredShard) -> Sequence[bytes]:
        return _Records(self, shard.num_bytes, shard.read, shard.name)


class _Records(Samples):
    def __init__(self, kind: FixedRecords, num_bytes: int, read: Callable[[int, int], bytes], name: str) -> None:
        self._kind, self._read, self.place = kind, read, name
        self._num_samples, rest = divmod(max(0, num_bytes - kind.header_bytes), kind.record_bytes)
        if rest:
            raise MissingTextError(
                f"{name} has {num_bytes:,} bytes, which are not whole records of {kind.record_bytes:,} bytes after a "
                f"header of {kind.header_bytes:,}. Correct record_bytes or header_bytes, or write the shard again."
            )

    def __len__(self) -> int:
        return self._num_samples

    def sample(self, number: int) -> bytes:
        start = self._kind.header_bytes + number * self._kind.record_bytes
        return self._read(start, start + self._kind.record_bytes)


def _file_name(name: str) -> str:
    """Return the last part of a path or a URL."""
    return name.partition("?")[0].rpartition("/")[2]
