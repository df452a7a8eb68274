"""A prepared corpus on disk: writes its token shards durably, and reads what exists.

<cache_dir>/<name>-<fingerprint>/
    tokens-00000.bin     tokens of the training split, then those of the validation split
    tokens-00000.json    its ShardEntry, written after it: the shard exists once this file exists
    ...
    sources.json         the files that were read, with size and time: input of the fingerprint
    index.json           CorpusIndex, written last: the corpus exists once this file exists

Hidden here: names and form of these files, and that a kill at any moment leaves no file that is believed and wrong.
Called by `prepare`; `dataset` reads the tokens. Imports no torch, since the processes that tokenise load it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import Field, ValidationError

from shoal_workers.contract import Frozen
from shoal_workers.data.documents import Position
from shoal_workers.data.tokenizer import Lookahead, Split
from shoal_workers.descriptors import sync_path

FORMAT = 3
"""Format of these files. It is part of the fingerprint, so another release reads only what it understands."""
INDEX_NAME = "index.json"
SOURCES_NAME = "sources.json"
_CHUNK_BYTES = 1 << 20


class ShardEntry(Frozen):
    """One file of tokens: a run of documents, both splits."""

    start: Position
    end: Position
    last: bool
    """No document follows."""
    num_tokens: dict[Split, int]
    num_documents: dict[Split, int]
    num_bytes: int = Field(ge=0)
    """Length of the file."""
    crc32: int
    """CRC-32 of the file."""
    tokens_hash: str
    """BLAKE2b of the file."""

    def is_intact(self, path: Path) -> bool:
        """The file has the length and the checksum that it was written with."""
        try:
            return path.stat().st_size == self.num_bytes and file_crc32(path) == self.crc32
        except OSError:
            return False


class CorpusIndex(Frozen):
    """A whole prepared corpus."""

    format: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    fingerprint: str
    """Hash of the files' paths, sizes and times, the tokenizer and the settings."""
    content_hash: str
    """Hash of the tokens in their order, and of the tokenizer: nodes with equal hashes read the same samples."""
    tokenizer: str
    vocab_size: int
    dtype: str
    """Type of a token in the shards, as numpy spells it: "<u2"."""
    num_files: int
    shards: tuple[ShardEntry, ...]

    def num_tokens(self, split: Split) -> int:
        return sum(shard.num_tokens[split] for shard in self.shards)

    def num_documents(self, split: Split) -> int:
        return sum(shard.num_documents[split] for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        return self.shards[-1].end.text_bytes if self.shards else 0

    @property
    def bad_rows(self) -> int:
        """Rows that were left out."""
        return self.shards[-1].end.bad_rows if self.shards else 0


def content_hash(tokenizer: str, shards: Sequence[ShardEntry]) -> str:
    """Hash of a corpus; `tokenizer`: the tokenizer's fingerprint."""
    described = [tokenizer, [(shard.tokens_hash, [shard.num_tokens[split] for split in Split]) for shard in shards]]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """An index and the directory that it describes."""

    directory: Path
    index: CorpusIndex

    @cached_property
    def bytes_per_token(self) -> float:
        """Bytes of text per token, over both splits; ends of documents count as tokens."""
        return self.index.text_bytes / sum(self.index.num_tokens(split) for split in Split)

    def shard_path(self, number: int) -> Path:
        return self.directory / shard_name(number)

    def describe_shard(self, number: int) -> str:
        """Its path, and the first and the last file that it was made from."""
        entry = self.index.shards[number]
        ends = sorted({entry.start.file, max(entry.start.file, entry.end.file - (entry.end.offset == 0))})
        try:
            sources = json.loads((self.directory / SOURCES_NAME).read_bytes())["sources"]
            files = " to ".join(str(sources[file][0]) for file in ends)
        except (OSError, ValueError, LookupError, TypeError):
            return str(self.shard_path(number))
        return f"{self.shard_path(number)} (from {files})"

    def is_intact(self) -> bool:
        """Every shard has its length and checksum; reads all of them (about 1 GB/s)."""
        return all(entry.is_intact(self.shard_path(number)) for number, entry in enumerate(self.index.shards))


def shard_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def load_corpus(directory: Path) -> Corpus | None:
    """Return the corpus that a directory's index describes, unverified; None if it is unfinished or the index is
    damaged."""
    try:
        return Corpus(directory, CorpusIndex.model_validate_json((directory / INDEX_NAME).read_bytes()))
    except (OSError, ValidationError):
        return None


def load_entry(path: Path) -> ShardEntry | None:
    """Return the entry beside a shard, if the shard is finished and intact."""
    try:
        entry = ShardEntry.model_validate_json(path.with_suffix(".json").read_bytes())
    except (OSError, ValidationError):
        return None
    return entry if entry.is_intact(path) else None


def file_crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


@dataclass(frozen=True, slots=True)
class Written:
    crc32: int
    digest: str
    """BLAKE2b of 16 bytes, in hexadecimal."""


def write_shard(
    path: Path, start: Position, documents: Lookahead, max_bytes: int, on_progress: Callable[[Position], None]
) -> ShardEntry:
    """Write the documents that fit into `max_bytes` (at least one) to `path`, and the entry beside it.

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
    """Atomically: the file has all of its content, or does not exist under this name."""
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
    sync_path(path.parent)
    return Written(crc, digest.hexdigest())
