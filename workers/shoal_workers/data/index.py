"""Descriptions of each token shard and of the whole corpus, stored beside them.

<cache_dir>/<name>-<fingerprint>/
    tokens-00000.bin     tokens of the training split, then those of the validation split
    tokens-00000.json    its ShardEntry, written after it: the shard exists once this file exists
    ...
    sources.json         the files that were read, with size and time: input of the fingerprint
    index.json           CorpusIndex, written last: the corpus exists once this file exists
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from pydantic import Field, ValidationError

from shoal_workers.contract.base import Frozen
from shoal_workers.data.documents import Position

FORMAT = 2
"""Of the files below; part of the fingerprint, so another release reads only what it understands."""
INDEX_NAME = "index.json"
SOURCES_NAME = "sources.json"
_CHUNK_BYTES = 1 << 20


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"


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


def content_hash(tokenizer: str, shards: Sequence[ShardEntry]) -> str:
    """Of a corpus; `tokenizer`: the tokenizer's fingerprint."""
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
    """The corpus that a directory's index describes, unverified; None if it is unfinished or the index is damaged."""
    try:
        return Corpus(directory, CorpusIndex.model_validate_json((directory / INDEX_NAME).read_bytes()))
    except (OSError, ValidationError):
        return None


def load_entry(path: Path) -> ShardEntry | None:
    """The entry beside a shard, if the shard is finished and intact."""
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
