"""Prepares token shards from text, once per `cache_dir`. Resumes after a kill.

    holder         the worker that holds the lock of the directory; it makes the shards
    the others     workers of its node, and of other nodes that share the directory, wait

Hidden here: which shards exist already, which process makes the others, and the progress. Much text is tokenised on all
cores (`tokenising`); the shards are the same as those of one thread. The name of the directory contains a fingerprint
of everything that could change the tokens, so its content is never outdated. Shards are verified when the corpus is
opened, and damaged ones are made again. Nothing is deleted from the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from shoal_workers.contract.text_data import TextDataConfig, TextFormat
from shoal_workers.data.corpus import (
    FORMAT,
    INDEX_NAME,
    SOURCES_NAME,
    Corpus,
    CorpusIndex,
    ShardEntry,
    content_hash,
    load_corpus,
    load_entry,
    shard_name,
    write_durably,
    write_shard,
)
from shoal_workers.data.documents import PIECE_BYTES, Position, read_documents
from shoal_workers.data.errors import CacheError, DataError, EmptyCorpusError
from shoal_workers.data.sources import SourceFile, find_sources
from shoal_workers.data.tokenising import encode_on_threads
from shoal_workers.data.tokenizer import (
    DocumentEncoder,
    Lookahead,
    Tokenizer,
    choose_token_dtype,
    load_tokenizer,
)
from shoal_workers.machine_limits import allowed_cores
from shoal_workers.node_lock import node_lock

Report = Callable[["PrepareProgress"], None]
MIB = 1 << 20
SHARD_BYTES = 64 * MIB
"""Part of the content hash of a corpus of several shards."""
_FEWEST_THREADS = 2
_verified: set[Path] = set()
"""Directories whose shards this process has verified, which it does once: verifying reads all of them."""


def prepare_corpora(config: TextDataConfig, report: Report) -> list[Corpus]:
    """Prepare the corpus of each source of a mixture, or the only corpus. Raises as `prepare_corpus`; an error names
    the source."""
    # each source has a directory of its own, so that a change of the weights needs no preparation
    source_configs = config.of_each_source()
    corpora = []
    for number, source_config in enumerate(source_configs):
        with named_source(config, number):
            prefix = f"source {number + 1} of {len(source_configs)}: " if config.sources else ""
            corpora.append(prepare_corpus(source_config, partial(_report_source, report, prefix)))
    return corpora


def _report_source(report: Report, prefix: str, progress: PrepareProgress) -> None:
    report(replace(progress, of_source=prefix))


@contextmanager
def named_source(config: TextDataConfig, number: int) -> Iterator[None]:
    """Name the source of a mixture in each DataError that the block raises."""
    try:
        yield
    except DataError as error:
        if not config.sources:
            raise
        raise type(error)(f"data.sources[{number}] ({config.sources[number].path}): {error}") from error


def prepare_corpus(
    config: TextDataConfig,
    report: Report,
    *,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Tokenizer | None = None,
    num_threads: int | None = None,
) -> Corpus:
    """Return the corpus of a config, and prepare it first if that is needed.

    Fast if the corpus exists and this process has verified it before.

    Args:
        report: called with the progress from time to time, on the calling thread.
        shard_bytes: maximum size of one shard's file.
        tokenizer: replaces the one that `data.tokenizer` names; only the calling thread tokenises then.
        num_threads: threads that tokenise; with 0 the calling one does. Default: one per core, but no more than are
            worth their start.

    Raises:
        DataError: the text, the tokenizer or the cache directory cannot be used.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(config.tokenizer)
    else:
        num_threads = 0
    sources = find_sources(config)
    inputs = _describe_inputs(config, sources, tokenizer, shard_bytes)
    fingerprint = hashlib.blake2b(inputs, digest_size=16).hexdigest()
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else Path.home() / ".cache" / "shoal" / "data"
    directory = cache / f"{config.corpus or 'text'}-{fingerprint}"
    corpus = _open_verified(directory, report)
    if corpus is None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            work = _Work(config, sources, directory, shard_bytes, num_threads)
            with node_lock(directory.with_suffix(".lock"), partial(_report_waiting, report)) as tell_waiting:
                report_to_all = _also_tell(report, tell_waiting)
                corpus = _open_verified(directory, report_to_all)  # another process may have prepared it meanwhile
                if corpus is None:
                    write_durably(directory / SOURCES_NAME, [inputs])
                    corpus = _Preparation(work, tokenizer, report_to_all).run(fingerprint)
        except OSError as error:
            raise CacheError(
                f"data.cache_dir {cache} cannot be used: {error.strerror or error}. "
                f"Set data.cache_dir to a directory on a disk with enough space."
            ) from error
        _verified.add(directory)
    report(PrepareProgress(PreparePhase.READY, bad_rows=corpus.index.bad_rows))
    return corpus


def _describe_inputs(
    config: TextDataConfig, sources: Sequence[SourceFile], tokenizer: Tokenizer, shard_bytes: int
) -> bytes:
    """Return everything that could change the tokens, as JSON."""
    inputs = {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "settings": config.model_dump(include={"validation_fraction", "max_bytes", "encoding_errors"}),
        "shard_bytes": shard_bytes,
        "piece_bytes": PIECE_BYTES,
        "sources": [
            (
                *(source.location, source.num_bytes, source.version),
                *(source.format, source.compression or "", source.is_tab_separated),
            )
            for source in sources
        ],
    }
    if any(source.format is not TextFormat.TEXT for source in sources):
        inputs["rows"] = config.model_dump(include={"field", "bad_rows"})
    return json.dumps(inputs, indent=1).encode()


def _open_verified(directory: Path, report: Report) -> Corpus | None:
    corpus = load_corpus(directory)
    if corpus is None or directory in _verified:
        return corpus
    report(PrepareProgress(PreparePhase.VERIFYING))
    return corpus if verify_corpus(corpus) else None


def verify_corpus(corpus: Corpus) -> bool:
    """Read every shard and compare checksums. The next `prepare_corpus` makes damaged shards again."""
    is_intact = corpus.is_intact()
    (_verified.add if is_intact else _verified.discard)(corpus.directory)
    return is_intact


def _report_waiting(report: Report, of_holder: str) -> None:
    report(PrepareProgress(PreparePhase.WAITING, of_holder=of_holder))


def _also_tell(report: Report, tell_waiting: Callable[[str], None]) -> Report:
    """Return a report that also tells the processes that wait for the lock."""

    def report_to_all(progress: PrepareProgress) -> None:
        report(progress)
        tell_waiting(progress.describe())

    return report_to_all


@dataclass(frozen=True, slots=True)
class _Work:
    """What to prepare, from the arguments of `prepare_corpus`."""

    config: TextDataConfig
    sources: Sequence[SourceFile]
    directory: Path
    shard_bytes: int
    num_threads: int | None


class _Preparation:
    """A pass over the shards of a directory, which keeps intact ones and makes the others."""

    def __init__(self, work: _Work, tokenizer: Tokenizer, report: Report) -> None:
        self._work = work
        self._tokenizer = tokenizer
        self._report = report
        self._encoder = DocumentEncoder(tokenizer, work.config.validation_fraction)
        self._num_threads = 0
        self._documents: Lookahead | None = None
        self._reached = Position()
        """Position at which the next of `_documents` begins."""
        total, limit = sum(source.num_bytes for source in work.sources), work.config.max_bytes
        self._is_limited = limit is not None and limit < total
        self._total_bytes = limit if limit is not None and self._is_limited else total
        """Bytes of text if `max_bytes` limits them; else bytes of the files, which may be compressed."""
        self._reported_bytes = 0

    def run(self, fingerprint: str) -> Corpus:
        """Make the shards that are missing or damaged, and the index. Call it with the lock held."""
        shards: list[ShardEntry] = []
        position = Position()
        while not (shards and shards[-1].last):
            path = self._work.directory / shard_name(len(shards))
            entry = load_entry(path)
            if entry is None or entry.start != position:
                entry = self._make_shard(path, position)
            shards.append(entry)
            position = entry.end
            self._report_progress(position)
        index = CorpusIndex(
            fingerprint=fingerprint,
            content_hash=content_hash(self._tokenizer.fingerprint, shards),
            tokenizer=self._work.config.tokenizer,
            vocab_size=self._tokenizer.vocab_size,
            dtype=choose_token_dtype(self._tokenizer.vocab_size).str,
            num_files=len(self._work.sources),
            shards=tuple(shards),
        )
        if not index.text_bytes:
            raise EmptyCorpusError(self._describe_empty())
        write_durably(self._work.directory / INDEX_NAME, [index.model_dump_json(indent=1).encode()])
        return Corpus(self._work.directory, index)

    def _make_shard(self, path: Path, start: Position) -> ShardEntry:
        path.with_suffix(".json").unlink(missing_ok=True)  # otherwise a kill could leave an old entry beside new tokens
        documents = self._documents_from(start)
        entry = write_shard(path, start, documents, self._work.shard_bytes, self._report_progress)
        self._reached = entry.end
        return entry

    def _documents_from(self, start: Position) -> Lookahead:
        """Return the encoded documents from `start` on."""
        # they continue after the last shard that was made, unless an intact one follows it
        if self._documents is None or self._reached != start:
            documents = read_documents(self._work.sources, start, self._work.config)
            num = self._num_threads = self._choose_num_threads(self._total_bytes - self._done_bytes(start))
            encoded = encode_on_threads(self._encoder, documents, num) if num else self._encoder.encode_all(documents)
            self._documents = Lookahead(encoded)
        return self._documents

    def _choose_num_threads(self, text_bytes: int) -> int:
        """Return 0 if so much text is not worth the start of threads."""
        bytes_per_thread = self._tokenizer.bytes_per_thread
        if self._work.num_threads is not None or bytes_per_thread is None:
            return self._work.num_threads or 0
        num = min(allowed_cores(), text_bytes // bytes_per_thread)
        return 0 if num < _FEWEST_THREADS else num

    def _report_progress(self, position: Position) -> None:
        """Report about 100 times at most, and at most once per MiB."""
        step, done = max(self._total_bytes // 100, MIB), self._done_bytes(position)
        if 0 < done < min(self._reported_bytes + step, self._total_bytes):
            return
        self._reported_bytes = done
        self._report(
            PrepareProgress(
                PreparePhase.TOKENISING,
                done,
                self._total_bytes,
                position.file,
                len(self._work.sources),
                num_threads=self._num_threads,
                bad_rows=position.bad_rows,
            )
        )

    def _done_bytes(self, position: Position) -> int:
        return position.text_bytes if self._is_limited else position.read_bytes

    def _describe_empty(self) -> str:
        config, sources = self._work.config, self._work.sources
        setting = f"data.corpus {config.corpus!r}" if config.corpus else "data.paths"
        if config.max_bytes is not None and any(source.num_bytes for source in sources):
            return (
                f"{setting}: the first document does not fit into data.max_bytes {config.max_bytes:,}, so there "
                f"is no text to read. Raise data.max_bytes (pieces of a document have up to {PIECE_BYTES:,} bytes)."
            )
        return (
            f"{setting} names {len(sources):,} files, but they contain no text (binary files in directories are "
            "skipped). Name files with text in data.paths."
        )


class PreparePhase(StrEnum):
    VERIFYING = "verifying"
    WAITING = "waiting"
    """Another process, of this node or of one that shares `cache_dir`, is preparing the same text."""
    TOKENISING = "tokenising"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    phase: PreparePhase
    done_bytes: int = 0
    total_bytes: int = 0
    done_files: int = 0
    total_files: int = 0
    num_threads: int = 0
    """Threads that tokenise; 0 if the one that prepares does it itself."""
    bad_rows: int = 0
    """Rows without text that were left out."""
    of_holder: str = ""
    """Only WAITING: progress of the process that prepares, as text; empty if unknown."""
    of_source: str = ""
    """Which source of a mixture this is, as the beginning of a message."""

    def describe(self) -> str:
        """Describe the progress for people: `tokenising 45 % (12.3 of 27.4 MiB, 1,203 of 2,410 files, 8 threads)`."""
        return self.of_source + self._describe_phase()

    def _describe_phase(self) -> str:
        match self.phase:
            case PreparePhase.VERIFYING:
                return "verifying the token shards"
            case PreparePhase.WAITING:
                return f"another process prepares the text{': ' if self.of_holder else ''}{self.of_holder}"
            case PreparePhase.READY:
                return f"text ready{self._bad_rows_text}"
            case PreparePhase.TOKENISING:
                threads = f", {self.num_threads} threads" if self.num_threads else ""
                percent = 100 * self.done_bytes // max(1, self.total_bytes)
                return (
                    f"tokenising {percent} % ({self.done_bytes / MIB:,.1f} of {self.total_bytes / MIB:,.1f} MiB, "
                    f"{self.done_files:,} of {self.total_files:,} files{threads}){self._bad_rows_text}"
                )

    @property
    def _bad_rows_text(self) -> str:
        return f", {self.bad_rows:,} bad rows left out" if self.bad_rows else ""
