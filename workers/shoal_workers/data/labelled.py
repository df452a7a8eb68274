"""Examples of a payload and labels on disk, made once per node from the rows of files, and read by their number.

    <cache_dir>/<kind>-<fingerprint>/    payload.bin      all payloads, one after the other: tokens, audio, images
                                         ends.npy         the end of each in it
                                         label_values.npy int32: classes, or tokens of targets
                                         label_ends.npy
                                         is_validation.npy
                                         content.json     hash of all of these

A directory is complete once it has its name; workers that make it at the same time make the same one. What a payload
is, the task says. The fingerprint is that of the settings and of the files' names, sizes and times, as for text.
Called by the tasks.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_workers.contract.encoders import RowsConfig
from shoal_workers.contract.text_data import BadRows, TextDataConfig
from shoal_workers.data.errors import BadRowError, CacheError, EmptyCorpusError
from shoal_workers.data.records import Record, records_of
from shoal_workers.data.sources import SourceFile, find_sources
from shoal_workers.data.tokenizer import Split, split_of

_VERSION = 1
_NOTE_EVERY = 10_000


@dataclass(frozen=True, slots=True)
class Labelled:
    """What a row becomes."""

    payload: bytes
    labels: Sequence[int]


@dataclass(frozen=True, slots=True)
class LabelledExamples:
    """All examples of a job."""

    payload: NDArray[Any]
    """uint8."""
    ends: NDArray[Any]
    label_values: NDArray[Any]
    """int32."""
    label_ends: NDArray[Any]
    is_validation: NDArray[Any]
    """One flag for each example."""
    content_hash: str

    def of(self, number: int) -> tuple[bytes, NDArray[Any]]:
        """Payload and labels of an example."""
        payload = self.payload[_part(self.ends, number)]
        return payload.tobytes(), np.asarray(self.label_values[_part(self.label_ends, number)])

    def numbers(self, split: Split) -> NDArray[Any]:
        """The examples of a split."""
        return np.flatnonzero(np.asarray(self.is_validation) == (split is Split.VALIDATION))

    def __len__(self) -> int:
        return len(self.ends)


def _part(ends: NDArray[Any], number: int) -> slice:
    return slice(int(ends[number - 1]) if number else 0, int(ends[number]))


def prepare_rows(
    config: RowsConfig,
    fields: Sequence[str],
    kind: str,
    settings: object,
    read: Callable[[Record], Labelled],
    progress: Callable[[str], None],
) -> LabelledExamples:
    """Makes the examples of the rows that `config` names, or finds those that were made before.

    Args:
        kind: begins the directory's name.
        settings: JSON; all else that `read` depends on.

    Raises:
        DataError: a file is missing, a row is not as it should be, or there is none.
        CacheError: the directory cannot be written.
    """
    train, validation = _sources(config, config.paths), _sources(config, config.validation_paths)

    def rows() -> Iterator[tuple[Labelled, bool]]:
        num_read = num_bad = 0
        for sources in (train, validation):
            for number, record in enumerate(one for source in sources for one in records_of(source, fields)):
                if config.max_examples is not None and number >= config.max_examples:
                    break
                if num_read % _NOTE_EVERY == 0:
                    progress(f"reading examples: {num_read:,} so far, {num_bad:,} left out")
                num_read += 1
                example = _example(record, read)
                if isinstance(example, Labelled):
                    yield example, sources is validation or (not validation and _is_held_back(example, config))
                elif config.bad_rows is BadRows.SKIP:
                    num_bad += 1
                else:
                    raise BadRowError(f'{example} Or set data.bad_rows: "skip" to leave such rows out.')

    described = {
        "fields": list(fields),
        "settings": settings,
        "files": [
            [(one.place, one.num_bytes, one.version, one.format) for one in part] for part in (train, validation)
        ],
        "rows": config.model_dump(mode="json", include={"validation_fraction", "max_examples", "bad_rows"}),
    }
    return prepare(config.cache_dir, kind, described, rows())


def _example(record: Record | BadRowError, read: Callable[[Record], Labelled]) -> Labelled | BadRowError:
    try:
        return record if isinstance(record, BadRowError) else read(record)
    except BadRowError as error:
        return error


def _sources(config: RowsConfig, paths: tuple[str, ...]) -> list[SourceFile]:
    return find_sources(TextDataConfig(paths=paths, format=config.format)) if paths else []


def _is_held_back(example: Labelled, config: RowsConfig) -> bool:
    labels = np.asarray(example.labels, np.int32).tobytes()
    return split_of(example.payload + labels, config.validation_fraction) is Split.VALIDATION


def prepare(
    cache_dir: str | None, kind: str, described: object, examples: Iterable[tuple[Labelled, bool]]
) -> LabelledExamples:
    """Makes the directory of the examples, each with whether it is for validation, or opens it. `described`, JSON, is
    all that they depend on. Raises EmptyCorpusError if there are none, CacheError if it cannot be written."""
    cache = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "shoal" / "data"
    text = json.dumps([_VERSION, described], sort_keys=True)
    directory = cache / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if not directory.is_dir():
        try:
            _write(directory, examples)
        except OSError as error:
            raise CacheError(
                f"data.cache_dir {str(cache)!r} cannot be written: {error.strerror or error}. Name a directory with "
                "room in data.cache_dir."
            ) from error
    names = ("payload", "ends", "label_values", "label_ends", "is_validation")
    files = {name: directory / ("payload.bin" if name == "payload" else f"{name}.npy") for name in names}
    arrays = {
        name: np.memmap(file, np.uint8, "r") if name == "payload" else np.load(file, mmap_mode="r")
        for name, file in files.items()
    }
    return LabelledExamples(**arrays, content_hash=json.loads((directory / "content.json").read_text())["hash"])


def _write(directory: Path, examples: Iterable[tuple[Labelled, bool]]) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="examples-part-") as folder:
        part = Path(folder) / "part"
        part.mkdir()
        sizes: list[int] = []
        labels: list[NDArray[Any]] = []
        held_back: list[bool] = []
        digest = hashlib.sha256()
        with (part / "payload.bin").open("wb") as payloads:
            for example, is_validation in examples:
                payloads.write(example.payload)
                digest.update(example.payload)
                sizes.append(len(example.payload))
                labels.append(np.asarray(example.labels, np.int32))
                held_back.append(is_validation)
        if not sum(sizes):
            raise EmptyCorpusError("data.paths have no example. Name files with rows, or a folder with images.")
        arrays = {
            "ends": np.cumsum(sizes, dtype=np.int64),
            "label_values": np.concatenate(labels),
            "label_ends": np.cumsum([len(one) for one in labels], dtype=np.int64),
            "is_validation": np.asarray(held_back, np.bool_),
        }
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", array)
            digest.update(array.tobytes())
        (part / "content.json").write_text(json.dumps({"hash": digest.hexdigest()}))
        with suppress(OSError):
            part.rename(directory)
    if not directory.is_dir():  # else another process was first, with the same
        raise OSError(f"{directory} was not made")
