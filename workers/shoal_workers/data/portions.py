"""Divides the text of a corpus between the nodes that share its `cache_dir`, and keeps what each of them has encoded.

    documents    | portion 0 | portion 1 | portion 2 | portion 3 | portion 4 | ...     about 32 MiB of the files each
    node a       | encodes   |           | encodes   |  reads 3  |           |         holds the corpus' lock: writes
    node b                   |  encodes  |           |           |  encodes  |         the token shards, in order
    node c                               |  encodes 3            |

    <corpus directory>/portions/
        holder.json          machine of the holder, and its portion; a waiting worker that reads it on another machine
                             thereby knows that the directory is shared
        helper-<machine>     made by such a worker; from then on the holder takes portions by claims
        00003.claim          locked by the one that encodes the portion; the kernel of its node, or the file server,
                             releases it when it dies, and another one takes the portion
        00003.tokens         its tokens
        00003.part           the end of each of its documents, counted from its begin; written last

Hidden here: the claims and these files. The holder alone writes shards, from documents in their order, so the shards
are those of one process, byte for byte. A file system whose locks do not reach other nodes costs work that is done
twice and nothing else. The directory is removed with the end of the preparation. Called by `prepare`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from shoal_workers.contract import Frozen
from shoal_workers.contract.text_data import TextDataConfig, TextFormat
from shoal_workers.data.corpus import file_crc32, write_durably
from shoal_workers.data.documents import Document, Place, Position, read_documents
from shoal_workers.data.errors import DataError
from shoal_workers.data.sources import SourceFile
from shoal_workers.data.tokenizer import EncodedDocument, EncodedText, Split
from shoal_workers.node_lock import has_locked

PORTION_BYTES = 32 << 20
_WINDOW = 64
"""Portions that may be encoded ahead of the holder, which limits the size of the directory."""
_POLL_S = 0.05
_SPLITS = tuple(Split)
_FIELDS = 7
"""Values of a document in a file: tokens, split, file, offset, text_bytes, read_bytes, bad_rows."""

EncodeAll = Callable[[Iterable[Document]], Iterator[EncodedDocument]]


@dataclass(frozen=True, slots=True)
class Portion:
    """The documents that begin at or after `first` and before `end`."""

    number: int
    first: Place
    end: Place
    num_bytes: int
    """About how many bytes of the files it has."""
    bytes_before: int
    """Those of the portions before it."""


def divided(sources: Sequence[SourceFile], portion_bytes: int) -> list[Portion]:
    """Consecutive files together until they have `portion_bytes`. A larger file is a portion of its own, and one of
    plain text is divided; a file of rows is not, because nothing says where a row begins."""
    ends: list[tuple[Place, int]] = []
    size = 0
    for number, source in enumerate(sources):
        is_divisible = source.format is TextFormat.TEXT and source.compression is None
        if is_divisible and source.num_bytes > portion_bytes:
            ends += [((number, 0), size)] if size else []
            offsets = range(portion_bytes, source.num_bytes, portion_bytes)
            ends += [((number, offset), portion_bytes) for offset in offsets]
            size = source.num_bytes - offsets[-1]
        else:
            size += source.num_bytes
        if size >= portion_bytes:
            ends.append(((number + 1, 0), size))
            size = 0
    if not ends or ends[-1][0] != (len(sources), 0):
        ends.append(((len(sources), 0), size))
    portions: list[Portion] = []
    first, before = (0, 0), 0
    for number, (end, size) in enumerate(ends):
        portions.append(Portion(number, first, end, size, before))
        first, before = end, before + size
    return portions


class _Holder(Frozen):
    machine: str
    portion: int
    """The one that it needs next."""


class _Header(Frozen):
    """First line of a portion's file; a table of its documents follows."""

    num_documents: int
    dtype: str
    end: Position
    """After the portion; text_bytes and bad_rows are those of the portion."""
    table_crc32: int
    tokens_crc32: int


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A portion that is encoded; positions as in its file."""

    table: NDArray[Any]
    tokens: NDArray[Any]
    end: Position

    def __iter__(self) -> Iterator[EncodedDocument]:
        first = 0
        for num_tokens, split, file, offset, text_bytes, read_bytes, bad_rows in self.table.tolist():
            end = Position(file=file, offset=offset, text_bytes=text_bytes, read_bytes=read_bytes, bad_rows=bad_rows)
            yield EncodedDocument(EncodedText(self.tokens[first : first + num_tokens], _SPLITS[split]), end)
            first += num_tokens


class Portions:
    """The portions of one corpus, for one process: the holder of its lock or a helper.

    Args:
        directory: of the corpus.
        machine: name of this machine; equal for processes that share its cores.
        advanced: called with the bytes of text of a portion that are encoded ahead, or for another node, so far.
    """

    def __init__(
        self,
        directory: Path,
        sources: Sequence[SourceFile],
        config: TextDataConfig,
        *,
        machine: str,
        portion_bytes: int,
        advanced: Callable[[int], None],
    ) -> None:
        self._directory = directory / "portions"
        self._sources = sources
        self._config = config
        self._machine = machine
        self._advanced = advanced
        self._all = divided(sources, portion_bytes)
        self._begins: dict[Place, Position] = {}
        """Where the first document of a portion begins, of those that this process has come by."""
        self._refused: set[int] = set()
        """Portions with an error in them: the holder meets it in its place."""
        self.num_others = 0
        """Other nodes that have offered help."""
        self.ahead_bytes = 0
        """Bytes of portions that are encoded and not used yet."""

    # the holder

    def hold(self) -> None:
        """Called once with the lock of the corpus held. Those that still help say so again."""
        self._directory.mkdir(exist_ok=True)
        for path in self._directory.glob("helper-*"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Called once the corpus exists."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def encoded_from(
        self, start: Position, encode_all: EncodeAll, waits: Callable[[], None]
    ) -> Iterator[EncodedDocument]:
        """All documents from `start` on, in their order, until the end or `data.max_bytes`.

        `waits`: called again and again while another node encodes the next portion.
        """
        at: Position | None = start
        place = (start.file, start.offset)
        number = next((portion.number for portion in self._all if place < portion.end), len(self._all))
        while at is not None and number < len(self._all):
            self._look(number)
            if self._is_shared:
                at = yield from self._shared(self._all[number], at, encode_all, waits)
                number += 1
            else:
                alone = _Alone(at, number)
                yield from encode_all(self._read_alone(alone))
                at, number = alone.at, alone.number

    def _read_alone(self, alone: _Alone) -> Generator[Document, None, None]:
        """Read until another node offers help: as long as there is none, documents of several portions are under way
        together."""
        while alone.at is not None and alone.number < len(self._all):
            self._look(alone.number)
            if self._is_shared:
                return
            end = self._all[alone.number].end
            alone.at = yield from read_documents(self._sources, alone.at, self._config, end)
            alone.number += 1

    @property
    def _is_shared(self) -> bool:
        return bool(self.num_others or self.ahead_bytes)

    def _look(self, number: int) -> None:
        """Say which portion is needed next, and note who helps."""
        names: set[str] = set()
        with suppress(OSError):  # alone it goes on without the directory
            self._directory.mkdir(exist_ok=True)
            _replace(self._directory / "holder.json", _Holder(machine=self._machine, portion=number).model_dump_json())
            names = {path.name for path in self._directory.iterdir()}
        self.num_others = sum(name.startswith("helper-") for name in names - {f"helper-{self._machine}"})
        self.ahead_bytes = sum(portion.num_bytes for portion in self._all[number:] if _file_of(portion.number) in names)

    def _shared(
        self, portion: Portion, start: Position, encode_all: EncodeAll, waits: Callable[[], None]
    ) -> Generator[EncodedDocument, None, Position | None]:
        while (finished := self._finished(portion)) is None:
            with self._claimed(portion) as is_mine:
                if is_mine and (finished := self._finished(portion)) is None:
                    reading = _Reading(read_documents(self._sources, start, self._config, portion.end))
                    yield from encode_all(reading)
                    return reading.end
            if finished is None and not self._encode_one(self._ahead_of(portion.number), encode_all):
                waits()
                time.sleep(_POLL_S)
            self._look(portion.number)
        limit, before = self._config.max_bytes, _before(finished, start)
        for document in finished:
            if (document.end.file, document.end.offset) <= (start.file, start.offset):
                continue  # it is in a shard already
            end = _moved(document.end, before)
            if limit is not None and end.text_bytes > limit:
                return None
            yield EncodedDocument(document.text, end)
        for suffix in (".part", ".tokens"):
            (self._directory / f"{portion.number:05d}{suffix}").unlink(missing_ok=True)
        return _moved(finished.end, before)

    def _ahead_of(self, number: int) -> Sequence[Portion]:
        """Those that may be encoded before the holder needs them; not what `data.max_bytes` certainly leaves out."""
        limit, ahead = self._config.max_bytes, self._all[number + 1 : number + _WINDOW]
        return ahead if limit is None else [document for document in ahead if document.bytes_before < limit]

    # a helper

    def help(self, encode_all: EncodeAll) -> bool:
        """Encode one portion for a holder on another machine; False: there is none, or nothing to do for it."""
        try:
            holder = _Holder.model_validate_json((self._directory / "holder.json").read_bytes())
            if holder.machine == self._machine:
                return False
            (self._directory / f"helper-{self._machine}").touch()
            return self._encode_one(self._ahead_of(holder.portion), encode_all)
        except (FileNotFoundError, NotADirectoryError, ValidationError):  # it has finished, or begins
            return False

    def _encode_one(self, portions: Sequence[Portion], encode_all: EncodeAll) -> bool:
        """Encode the first portion that no node has encoded or is encoding; False if there is none."""
        for portion in portions:
            path = self._directory / _file_of(portion.number)
            if portion.number in self._refused or path.exists():
                continue
            with self._claimed(portion) as is_mine:
                if is_mine and not path.exists():
                    try:
                        self._encode(portion, path, encode_all)
                    except DataError:
                        self._refused.add(portion.number)
                        continue
                    return True
        return False

    def _encode(self, portion: Portion, path: Path, encode_all: EncodeAll) -> None:
        """Its first document is found from the begin of its file, or of the last portion of the file that this process
        has come by."""
        config = self._config.model_copy(update={"max_bytes": None})
        number, offset = portion.first
        known = max((place for place in self._begins if (number, 0) <= place <= portion.first), default=None)
        begin = self._begins[known] if known is not None else Position(file=number)
        if known != portion.first and offset:
            passed = _Reading(read_documents(self._sources, begin, config, portion.first))
            deque(passed, maxlen=0)
            begin = passed.reached
        begin = begin.model_copy(update={"text_bytes": 0, "bad_rows": 0})
        self._begins[portion.first] = begin
        reading = _Reading(read_documents(self._sources, begin, config, portion.end))
        table, dtype, crc = [], "<u1", 0
        unfinished = path.with_suffix(f".{self._machine}.tmp")
        with unfinished.open("wb") as file:
            for document in encode_all(reading):
                data, dtype = document.text.tokens.tobytes(), document.text.tokens.dtype.str
                crc = zlib.crc32(data, crc)
                file.write(data)
                end = document.end
                counts = (end.file, end.offset, end.text_bytes, end.read_bytes, end.bad_rows)
                table.append((len(document.text.tokens), _SPLITS.index(document.text.split), *counts))
                self._advanced(end.text_bytes)
            file.flush()
            os.fsync(file.fileno())
        if portion.end[1]:
            self._begins[portion.end] = reading.reached
        unfinished.replace(path.with_suffix(".tokens"))
        rows = np.array(table, dtype="<i8").tobytes()
        header = _Header(
            num_documents=len(table),
            dtype=dtype,
            end=reading.reached,
            table_crc32=zlib.crc32(rows),
            tokens_crc32=crc,
        )
        write_durably(path, [header.model_dump_json().encode() + b"\n", rows])

    def _finished(self, portion: Portion) -> _Encoded | None:
        """None if it is not encoded yet, or its files are damaged."""
        path = self._directory / _file_of(portion.number)
        try:
            head, _, rows = path.read_bytes().partition(b"\n")
            header = _Header.model_validate_json(head)
            tokens = path.with_suffix(".tokens")
            if (zlib.crc32(rows), file_crc32(tokens)) != (header.table_crc32, header.tokens_crc32):
                return None
            is_empty = not tokens.stat().st_size  # which cannot be mapped
            mapped = np.empty(0, header.dtype) if is_empty else np.memmap(tokens, dtype=header.dtype, mode="r")
        except (OSError, ValueError):
            return None
        return _Encoded(np.frombuffer(rows, dtype="<i8").reshape(-1, _FIELDS), mapped, header.end)

    @contextmanager
    def _claimed(self, portion: Portion) -> Iterator[bool]:
        with (self._directory / f"{portion.number:05d}.claim").open("ab") as file:
            yield has_locked(file, fcntl.LOCK_EX)


class _Reading:
    """Documents, and the position after them once they are all taken."""

    def __init__(self, documents: Generator[Document, None, Position | None]) -> None:
        self._documents = documents
        self.end: Position | None = None
        """None if `data.max_bytes` was reached, or documents are left."""

    def __iter__(self) -> Generator[Document, None, None]:
        self.end = yield from self._documents

    @property
    def reached(self) -> Position:
        assert self.end is not None, "all are taken, and there is no limit"
        return self.end


@dataclass(slots=True)
class _Alone:
    """How far a holder without help has come."""

    at: Position | None
    number: int


def _file_of(number: int) -> str:
    return f"{number:05d}.part"


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _before(documents: _Encoded, start: Position) -> Position:
    """The totals at the begin of a portion, of which `start` may be in the middle."""
    place = (start.file, start.offset)
    inside = next((document.end for document in documents if (document.end.file, document.end.offset) == place), None)
    if inside is None:  # it is at the begin
        return start
    return start.model_copy(
        update={
            "text_bytes": start.text_bytes - inside.text_bytes,
            "bad_rows": start.bad_rows - inside.bad_rows,
        }
    )


def _moved(position: Position, before: Position) -> Position:
    """From counts of a portion to those of the corpus."""
    return position.model_copy(
        update={
            "text_bytes": position.text_bytes + before.text_bytes,
            "bad_rows": position.bad_rows + before.bad_rows,
        }
    )
