"""Reads shards in the formats of other libraries: random access to the samples of a file on local disk.

    open_shard(path)            a sequence of dictionaries; the file is mapped into memory, not read
    read_index(name, content)   the shards that an index names, with their bytes and samples

WebDataset tar, MDS, LitData and JSON lines may be compressed as whole files; Parquet and Arrow are compressed inside.
Images, audio and other files are bytes: a user's `decode` function makes tensors of them. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from shoal_workers.data.errors import DamagedShardError, MissingTextError
from shoal_workers.data.shards.litdata import LitDataShard
from shoal_workers.data.shards.mds import MdsShard
from shoal_workers.data.shards.rows import ArrowShard, JsonLinesShard, ParquetShard
from shoal_workers.data.shards.shard import COMPRESSIONS
from shoal_workers.data.shards.webdataset import TarShard


class ShardFormat(StrEnum):
    WEBDATASET = "webdataset"
    MDS = "mds"
    LITDATA = "litdata"
    PARQUET = "parquet"
    ARROW = "arrow"
    JSONL = "jsonl"


_SUFFIXES = {
    ".tar": ShardFormat.WEBDATASET,
    ".tgz": ShardFormat.WEBDATASET,
    ".mds": ShardFormat.MDS,
    ".bin": ShardFormat.LITDATA,
    ".parquet": ShardFormat.PARQUET,
    ".arrow": ShardFormat.ARROW,
    ".feather": ShardFormat.ARROW,
    ".jsonl": ShardFormat.JSONL,
    ".ndjson": ShardFormat.JSONL,
    ".json": ShardFormat.JSONL,
}
_READERS = {
    ShardFormat.WEBDATASET: TarShard,
    ShardFormat.MDS: MdsShard,
    ShardFormat.PARQUET: ParquetShard,
    ShardFormat.ARROW: ArrowShard,
    ShardFormat.JSONL: JsonLinesShard,
}


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """A shard in an index."""

    name: str
    """Relative to the folder of the index."""
    num_bytes: int
    """Length of the file. For a compressed chunk of LitData, length of its content, since the index has no other."""
    num_samples: int


def open_shard(
    path: Path, format: ShardFormat | None = None, *, index: bytes | None = None
) -> Sequence[dict[str, Any]]:
    """Open a file for random access. Its table of contents is read now, and samples on access.

    Args:
        format: default: the format that the suffix of the name stands for.
        index: content of `index.json`, for LitData only, if that is not beside the file.

    Raises:
        MissingTextError: the file does not exist, or the suffix of its name stands for no format.
        DamagedShardError: the content violates the format.
    """
    format = format or find_shard_format(path.name)
    if format is None:
        raise MissingTextError(
            f"{path} has a name that says no format of shards ({', '.join(_SUFFIXES)}; compressed also with "
            f"{', '.join(COMPRESSIONS)} behind it). Give its format: {', '.join(ShardFormat)}."
        )
    return LitDataShard(path, index) if format is ShardFormat.LITDATA else _READERS[format](path)


def find_shard_format(name: str) -> ShardFormat | None:
    """Return the format for which the suffix of a file name or URL stands; None if for none."""
    path = PurePosixPath(name)
    inner = PurePosixPath(path.stem).suffix if path.suffix in COMPRESSIONS else ""
    return _SUFFIXES.get(path.suffix.lower()) or _SUFFIXES.get(inner.lower())


def read_index(name: str, content: bytes) -> tuple[IndexedShard, ...]:
    """Read an `index.json` of MDS (version 2) or LitData, or a WebDataset index of `wids`; shards in their order.

    Args:
        name: name of the index, for messages.

    Raises:
        DamagedShardError: the content is no index of these.
    """
    try:
        index = json.loads(content)
        if "shards" in index:
            return tuple(_read_mds_shard(shard) for shard in index["shards"])
        if "chunks" in index:
            return tuple(
                IndexedShard(str(chunk["filename"]), int(chunk["chunk_bytes"]), int(chunk["chunk_size"]))
                for chunk in index["chunks"]
            )
        return tuple(
            IndexedShard(str(shard["url"]), int(shard["filesize"]), int(shard["nsamples"]))
            for shard in index["shardlist"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedShardError(
            f"{name} is no index of MDS, LitData or WebDataset ({type(error).__name__}: {error}). Write it again with "
            "the library that wrote the shards, or name the shards instead."
        ) from error


def _read_mds_shard(shard: dict[str, Any]) -> IndexedShard:
    version, format = shard["version"], shard["format"]
    if version != 2 or format not in ("mds", "json"):
        raise ValueError(f"format {format!r} of version {version}, and version 2 of mds and json is read")
    file = shard["zip_data"] or shard["raw_data"]
    return IndexedShard(str(file["basename"]), int(file["bytes"]), int(shard["samples"]))
