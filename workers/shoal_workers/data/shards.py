"""Writes one token shard: consecutive documents as one durable file of tokens, with a checksum. Called by `prepare`."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_workers.data.documents import Document, Position
from shoal_workers.data.index import ShardEntry, Split
from shoal_workers.data.tokenizer import Tokenizer


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned integer type that holds every token; little-endian on every machine."""
    return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def split_of(text: bytes, validation_fraction: float) -> Split:
    """Depends only on the hash of the text, so renaming and reordering do not change it, nor do equal texts differ."""
    share = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64
    return Split.VALIDATION if share < validation_fraction else Split.TRAIN


class ShardWriter:
    """Writes the tokens of documents into a shard, up to a maximum size."""

    def __init__(self, tokenizer: Tokenizer, *, validation_fraction: float, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._validation_fraction = validation_fraction
        self._max_bytes = max_bytes
        self._dtype = token_dtype(tokenizer.vocab_size)

    def write(
        self, path: Path, start: Position, documents: Iterable[Document], on_progress: Callable[[Position], None]
    ) -> ShardEntry:
        """Writes the documents that fit (at least one) to `path`, and the entry beside it. Durable when it returns."""
        tokens: dict[Split, list[NDArray[Any]]] = {split: [] for split in Split}
        num_documents = dict.fromkeys(Split, 0)
        text_hash = hashlib.blake2b(digest_size=16)
        end, num_bytes, last = start, 0, True
        for document in documents:
            encoded = self._encode(document)
            if num_bytes and num_bytes + encoded.nbytes > self._max_bytes:
                last = False
                break
            split = split_of(document.text, self._validation_fraction)
            tokens[split].append(encoded)
            num_documents[split] += 1
            text_hash.update(hashlib.blake2b(document.text, digest_size=16).digest())
            num_bytes += encoded.nbytes
            end = document.end
            on_progress(end)
        arrays = [array for split in Split for array in tokens[split]]
        entry = ShardEntry(
            start=start,
            end=end,
            last=last,
            num_tokens={split: sum(map(len, tokens[split])) for split in Split},
            num_documents=num_documents,
            num_bytes=num_bytes,
            crc32=write_durably(path, arrays),
            text_hash=text_hash.hexdigest(),
        )
        write_durably(path.with_suffix(".json"), [entry.model_dump_json(indent=1).encode()])
        return entry

    def _encode(self, document: Document) -> NDArray[Any]:
        body = self._tokenizer.encode(document.text)
        end = self._tokenizer.end_of_document
        closes = document.ends_file and end is not None
        encoded = np.empty(len(body) + closes, dtype=self._dtype)
        encoded[: len(body)] = body
        if closes:
            encoded[-1] = end
        return encoded


def write_durably(path: Path, parts: Iterable[bytes | NDArray[Any]]) -> int:
    """Writes a file atomically and durably; returns its crc32."""
    crc = 0
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        for part in parts:
            data = part if isinstance(part, bytes) else part.tobytes()
            crc = zlib.crc32(data, crc)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return crc
