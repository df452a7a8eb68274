"""Samples of shards as other libraries write them, each read as it is: random access to a file on local disk.

    open_shard(path)            a sequence of dictionaries; the file is mapped into memory, not read
    read_index(name, content)   the shards that an index names, with their bytes and samples

WebDataset tar, MDS, LitData and JSON lines, in files that may be compressed as a whole; Parquet and Arrow, which have
their compression inside. Images, audio and other files are bytes: a user's `decode` function makes tensors of them.
Nothing is unpickled. Called by `sharded_files`, by the streams of shards in object stores, and by tasks.
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
    """A shard as an index names it."""

    name: str
    """Relative to the folder of the index."""
    num_bytes: int
    """Length of the file. For a chunk of LitData that is compressed as a whole, that of its content: the index has no
    other."""
    num_samples: int


def open_shard(
    path: Path, format: ShardFormat | None = None, *, index: bytes | None = None
) -> Sequence[dict[str, Any]]:
    """Opens a file for random access. Its table of contents is read; samples are read when they are asked for.

    Args:
        format: None: what the name says.
        index: LitData only: the content of `index.json`, if it does not lie beside the file.

    Raises:
        MissingTextError: the file does not exist, or its name says no format.
        DamagedShardError: it is not what its format demands.
    """
    format = format or format_of(path.name)
    if format is None:
        raise MissingTextError(
            f"{path} has a name that says no format of shards ({', '.join(_SUFFIXES)}; compressed also with "
            f"{', '.join(COMPRESSIONS)} behind it). Give its format: {', '.join(ShardFormat)}."
        )
    return LitDataShard(path, index) if format is ShardFormat.LITDATA else _READERS[format](path)


def format_of(name: str) -> ShardFormat | None:
    """What the name of a file or the last part of a URL says about its format."""
    path = PurePosixPath(name)
    inner = PurePosixPath(path.stem).suffix if path.suffix in COMPRESSIONS else ""
    return _SUFFIXES.get(path.suffix.lower()) or _SUFFIXES.get(inner.lower())


def read_index(name: str, content: bytes) -> tuple[IndexedShard, ...]:
    """The shards of an `index.json` of MDS (version 2) or LitData, or of a WebDataset index of `wids`, in their order.

    Args:
        name: of the index, for messages.

    Raises:
        DamagedShardError: it is none of these.
    """
    try:
        index = json.loads(content)
        if "shards" in index:
            return tuple(_of_mds(shard) for shard in index["shards"])
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


def _of_mds(shard: dict[str, Any]) -> IndexedShard:
    version, format = shard["version"], shard["format"]
    if version != 2 or format not in ("mds", "json"):
        raise ValueError(f"format {format!r} of version {version}, and version 2 of mds and json is read")
    stored = shard["zip_data"] or shard["raw_data"]
    return IndexedShard(str(stored["basename"]), int(stored["bytes"]), int(shard["samples"]))
