"""Writes one token shard: consecutive documents as one durable file of tokens, with a checksum. Called by `prepare`."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from shoal_workers.data.documents import Position
from shoal_workers.data.index import ShardEntry, Split
from shoal_workers.data.tokenise.encoding import Lookahead


@dataclass(frozen=True, slots=True)
class Written:
    """Checksums of a file."""

    crc32: int
    digest: str
    """BLAKE2b of 16 bytes, in hexadecimal."""


def write_shard(
    path: Path, start: Position, documents: Lookahead, max_bytes: int, on_progress: Callable[[Position], None]
) -> ShardEntry:
    """Writes the documents that fit into `max_bytes` (at least one) to `path`, and the entry beside it.

    Durable when it returns. The first document that does not fit is left in `documents`.
    """
    tokens: dict[Split, list[NDArray[Any]]] = {split: [] for split in Split}
    end, num_bytes = start, 0
    while (document := documents.peek()) is not None:
        text = document.text
        if num_bytes and num_bytes + text.tokens.nbytes > max_bytes:
            break
        documents.take()
        tokens[text.split].append(text.tokens)
        num_bytes += text.tokens.nbytes
        end = document.end
        on_progress(end)
    written = write_durably(path, [array for split in Split for array in tokens[split]])
    entry = ShardEntry(
        start=start,
        end=end,
        last=document is None,
        num_tokens={split: sum(map(len, tokens[split])) for split in Split},
        num_documents={split: len(tokens[split]) for split in Split},
        num_bytes=num_bytes,
        crc32=written.crc32,
        tokens_hash=written.digest,
    )
    write_durably(path.with_suffix(".json"), [entry.model_dump_json(indent=1).encode()])
    return entry


def write_durably(path: Path, parts: Iterable[bytes | NDArray[Any]]) -> Written:
    """Writes a file atomically and durably."""
    crc, digest = 0, hashlib.blake2b(digest_size=16)
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        for part in parts:
            data = part if isinstance(part, bytes) else part.tobytes()
            crc = zlib.crc32(data, crc)
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return Written(crc, digest.hexdigest())
