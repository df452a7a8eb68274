"""Prepares token shards from text, once per node: one process works, the others wait. Resumes after a kill.

The name of the cache directory contains a fingerprint of everything that could change the tokens, so its content is
never outdated. Shards are verified when the corpus is opened, and damaged ones are made again. Nothing is deleted from
the cache. Called by the built-in tasks and by `shoal data prepare`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from shoal_workers.contract.model.lm import TextDataConfig
from shoal_workers.data.documents import PIECE_BYTES, Position, read_documents
from shoal_workers.data.errors import CacheError, EmptyCorpusError
from shoal_workers.data.index import (
    INDEX_NAME,
    Corpus,
    CorpusIndex,
    ShardEntry,
    load_corpus,
    load_entry,
    shard_name,
)
from shoal_workers.data.lock import node_lock
from shoal_workers.data.progress import MIB, PreparePhase, PrepareProgress
from shoal_workers.data.shards import ShardWriter, token_dtype, write_durably
from shoal_workers.data.sources import SourceFile, find_sources
from shoal_workers.data.tokenizer import Tokenizer, load_tokenizer

Report = Callable[[PrepareProgress], None]
SHARD_BYTES = 64 * MIB
_verified: set[Path] = set()
"""Directories whose shards this process has verified: it reads all of them, so it is done once per process."""


def prepare_corpus(
    config: TextDataConfig, report: Report, *, shard_bytes: int = SHARD_BYTES, tokenizer: Tokenizer | None = None
) -> Corpus:
    """The prepared corpus of a config. Returns quickly if it exists and this process has verified it before.

    Args:
        report: called with the progress from time to time, on the calling thread.
        shard_bytes: maximum size of one shard's file.
        tokenizer: replaces the one that `data.tokenizer` names.

    Raises:
        DataError: the text, the tokenizer or the cache directory cannot be used.
    """
    tokenizer = tokenizer or load_tokenizer(config.tokenizer)
    sources = find_sources(config)
    described = _describe(config, sources, tokenizer, shard_bytes)
    fingerprint = hashlib.blake2b(described, digest_size=16).hexdigest()
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else Path.home() / ".cache" / "shoal" / "data"
    directory = cache / f"{config.corpus or 'text'}-{fingerprint}"
    corpus = _opened(directory, report)
    if corpus is None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with node_lock(directory.with_suffix(".lock"), partial(_report_waiting, report)) as say:
                both = _also_said(report, say)
                corpus = _opened(directory, both)
                if corpus is None:
                    write_durably(directory / "sources.json", [described])
                    preparation = _Preparation(config, sources, tokenizer, directory, shard_bytes, both)
                    corpus = preparation.run(fingerprint)
        except OSError as error:
            raise CacheError(
                f"data.cache_dir {cache} cannot be used: {error.strerror or error}. "
                f"Set data.cache_dir to a directory on a disk with enough space."
            ) from error
        _verified.add(directory)
    report(PrepareProgress(PreparePhase.READY))
    return corpus


def _report_waiting(report: Report, text: str) -> None:
    report(PrepareProgress(PreparePhase.WAITING, of_holder=text))


def _also_said(report: Report, say: Callable[[str], None]) -> Report:
    """Also shows the progress to the processes that wait for the lock."""

    def report_and_say(progress: PrepareProgress) -> None:
        report(progress)
        say(progress.describe())

    return report_and_say


def verify_corpus(corpus: Corpus) -> bool:
    """Reads every shard and compares checksums. The next `prepare_corpus` makes damaged shards again."""
    intact = corpus.is_intact()
    (_verified.add if intact else _verified.discard)(corpus.directory)
    return intact


def _opened(directory: Path, report: Report) -> Corpus | None:
    corpus = load_corpus(directory)
    if corpus is None or directory in _verified:
        return corpus
    report(PrepareProgress(PreparePhase.VERIFYING))
    return corpus if verify_corpus(corpus) else None


def _describe(config: TextDataConfig, sources: Sequence[SourceFile], tokenizer: Tokenizer, shard_bytes: int) -> bytes:
    """Everything that could change the tokens, as JSON."""
    described = {
        "format": 1,
        "tokenizer": tokenizer.fingerprint,
        "settings": config.model_dump(include={"validation_fraction", "max_bytes", "encoding_errors"}),
        "shard_bytes": shard_bytes,
        "piece_bytes": PIECE_BYTES,
        "sources": [(str(source.path), source.num_bytes, source.mtime_ns) for source in sources],
    }
    return json.dumps(described, indent=1).encode()


class _Preparation:
    """One pass over the shards of a directory: keeps intact ones, makes the others. The caller holds the lock."""

    def __init__(
        self,
        config: TextDataConfig,
        sources: Sequence[SourceFile],
        tokenizer: Tokenizer,
        directory: Path,
        shard_bytes: int,
        report: Report,
    ) -> None:
        self._config = config
        self._sources = sources
        self._tokenizer = tokenizer
        self._directory = directory
        self._report = report
        self._writer = ShardWriter(tokenizer, validation_fraction=config.validation_fraction, max_bytes=shard_bytes)
        total = sum(source.num_bytes for source in sources)
        self._total_bytes = min(total, config.max_bytes or total)
        self._reported_bytes = 0

    def run(self, fingerprint: str) -> Corpus:
        shards: list[ShardEntry] = []
        position = Position()
        while not (shards and shards[-1].last):
            path = self._directory / shard_name(len(shards))
            entry = load_entry(path)
            if entry is None or entry.start != position:
                entry = self._make(path, position)
            shards.append(entry)
            position = entry.end
            self._report_progress(position)
        index = CorpusIndex(
            fingerprint=fingerprint,
            content_hash=hashlib.blake2b("".join(s.text_hash for s in shards).encode(), digest_size=16).hexdigest(),
            tokenizer=self._config.tokenizer,
            vocab_size=self._tokenizer.vocab_size,
            dtype=token_dtype(self._tokenizer.vocab_size).str,
            num_files=len(self._sources),
            shards=tuple(shards),
        )
        if not index.text_bytes:
            raise EmptyCorpusError(self._empty())
        write_durably(self._directory / INDEX_NAME, [index.model_dump_json(indent=1).encode()])
        return Corpus(self._directory, index)

    def _make(self, path: Path, start: Position) -> ShardEntry:
        path.with_suffix(".json").unlink(missing_ok=True)  # otherwise a kill could leave an old entry beside new tokens
        documents = read_documents(
            self._sources,
            start,
            max_bytes=self._config.max_bytes,
            encoding_errors=self._config.encoding_errors,
        )
        return self._writer.write(path, start, documents, self._report_progress)

    def _report_progress(self, position: Position) -> None:
        """Reports about 100 times at most, and at most once per MiB."""
        step = max(self._total_bytes // 100, MIB)
        if 0 < position.text_bytes < min(self._reported_bytes + step, self._total_bytes):
            return
        self._reported_bytes = position.text_bytes
        self._report(
            PrepareProgress(
                PreparePhase.TOKENISING, position.text_bytes, self._total_bytes, position.file, len(self._sources)
            )
        )

    def _empty(self) -> str:
        named = f"data.corpus {self._config.corpus!r}" if self._config.corpus else "data.paths"
        if self._config.max_bytes is not None and any(source.num_bytes for source in self._sources):
            return (
                f"{named}: the first document does not fit into data.max_bytes {self._config.max_bytes:,}, so there is "
                f"no text to read. Raise data.max_bytes (pieces of a document have up to {PIECE_BYTES:,} bytes)."
            )
        return (
            f"{named} names {len(self._sources):,} files, but they contain no text (binary files in directories are "
            "skipped). Name files with text in data.paths."
        )
