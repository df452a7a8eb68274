"""Examples of a payload and labels on disk, made once per node from the rows of files, and read by their number.

    <cache_dir>/<kind>-<fingerprint>/    payload.bin      all payloads, one after the other: tokens, audio, images
                                         ends.npy         the end of each in it
                                         label_values.npy int32: classes, or tokens of targets
                                         label_ends.npy
                                         is_validation.npy
                                         content.json     hash of all of these; rows that were left out

A directory is complete once it has its name; workers that make it at the same time make the same one. What a payload
is, the task says. The fingerprint is that of the settings and of the files' names, sizes and times, as for text.
Called by the tasks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_workers.contract.text_data import BadRows, ExamplesConfig, RowsConfig, TextDataConfig
from shoal_workers.data.errors import BadRowError, CacheError, EmptyCorpusError, MissingTextError
from shoal_workers.data.records import Record, read_records
from shoal_workers.data.sources import SourceFile, find_sources
from shoal_workers.data.tokenizer import Split, choose_split, mark_held_back

_VERSION = 3
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
    num_left_out: int
    """Rows that could not be read, with `data.bad_rows: skip`."""
    first_left_out: str
    """Which one was the first, and why."""

    def read(self, number: int) -> tuple[bytes, NDArray[Any]]:
        """Return payload and labels of an example."""
        payload = self.payload[_part(self.ends, number)]
        return payload.tobytes(), np.asarray(self.label_values[_part(self.label_ends, number)])

    def numbers(self, split: Split) -> NDArray[Any]:
        """Return the examples of a split."""
        return np.flatnonzero(np.asarray(self.is_validation) == (split is Split.VALIDATION))

    def label_counts(self, split: Split) -> dict[int, int]:
        """How many examples of a split have each label; empty unless each example has one."""
        if not np.array_equal(self.label_ends, np.arange(1, len(self) + 1)):
            return {}
        labels, counts = np.unique(np.asarray(self.label_values)[self.numbers(split)], return_counts=True)
        return dict(zip(labels.tolist(), counts.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.ends)


def _part(ends: NDArray[Any], number: int) -> slice:
    return slice(int(ends[number - 1]) if number else 0, int(ends[number]))


def read_unchanged(file: Path, num_bytes: int) -> bytes:
    """Return the content of a file that a payload names. `num_bytes`: its size when the payload was written.

    Raises:
        MissingTextError: it no longer exists, or has changed.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise MissingTextError(f"{file} cannot be read: {error.strerror}.") from error
    if len(content) != num_bytes:
        raise MissingTextError(f"{file} has changed: it had {num_bytes} bytes, and has {len(content)}. Put it back.")
    return content


def prepare_rows(
    config: RowsConfig,
    fields: Sequence[str],
    kind: str,
    settings: object,
    read: Callable[[Record], Labelled],
    progress: Callable[[str], None],
) -> LabelledExamples:
    """Make the examples of the rows that `config` names, or find those that were made before.

    Args:
        kind: begins the directory's name.
        settings: JSON; all else that `read` depends on.

    Raises:
        DataError: a file is missing, a row is not as it should be, or there is none.
        CacheError: the directory cannot be written.
    """
    train, validation = _sources(config, config.paths), _sources(config, config.validation_paths)

    def rows() -> Iterator[tuple[Labelled | BadRowError, bool]]:
        for sources in (train, validation):
            records = (record for source in sources for record in read_records(source, fields))
            for record in itertools.islice(records, config.max_examples):
                example = _example(record, read, config.bad_rows)
                yield example, sources is validation or (not validation and _is_held_back(example, config))

    described = {
        "fields": list(fields),
        "settings": settings,
        "files": [describe_files(files) for files in (train, validation)],
        "rows": config.model_dump(mode="json", include={"validation_fraction", "max_examples", "bad_rows"}),
    }
    return prepare(config, kind, described, rows(), progress)


def _example(
    record: Record | BadRowError, read: Callable[[Record], Labelled], bad_rows: BadRows
) -> Labelled | BadRowError:
    try:
        if isinstance(record, BadRowError):
            raise record
        return read(record)
    except BadRowError as error:
        if bad_rows is BadRows.REFUSE:
            raise BadRowError(f'{error} Or set data.bad_rows: "skip" to leave such rows out.') from error
        return error


def describe_files(files: Iterable[SourceFile]) -> list[tuple[object, ...]]:
    """Return what changes if a file does, as JSON."""
    return [(file.location, file.num_bytes, file.version, file.format) for file in files]


def _sources(config: RowsConfig, paths: tuple[str, ...]) -> list[SourceFile]:
    return find_sources(TextDataConfig(paths=paths, format=config.format)) if paths else []


def _is_held_back(example: Labelled | BadRowError, config: RowsConfig) -> bool:
    if isinstance(example, BadRowError):
        return False
    labels = np.asarray(example.labels, np.int32).tobytes()
    return choose_split(example.payload + labels, config.validation_fraction) is Split.VALIDATION


def prepare(
    config: RowsConfig | ExamplesConfig,
    kind: str,
    described: object,
    examples: Iterable[tuple[Labelled | BadRowError, bool]],
    progress: Callable[[str], None],
) -> LabelledExamples:
    """Make the directory of the examples, each with whether it is for validation, or open it.

    Args:
        described: JSON; all that the examples depend on.
        examples: an error stands for one that is left out.

    Raises:
        EmptyCorpusError: there are none.
        CacheError: the directory cannot be written.
    """
    cache_dir = config.cache_dir
    cache = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "shoal" / "data"
    text = json.dumps([_VERSION, described], sort_keys=True)
    directory = cache / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if not directory.is_dir():
        try:
            _write(directory, config, examples, progress)
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
    content = json.loads((directory / "content.json").read_text())
    if content["num_left_out"]:
        progress(f"{content['num_left_out']:,} examples are left out, the first because {content['first_left_out']}")
    return LabelledExamples(
        **arrays,
        content_hash=content["hash"],
        num_left_out=content["num_left_out"],
        first_left_out=content["first_left_out"],
    )


def _write(
    directory: Path,
    config: RowsConfig | ExamplesConfig,
    examples: Iterable[tuple[Labelled | BadRowError, bool]],
    progress: Callable[[str], None],
) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="examples-part-") as folder:
        part = Path(folder) / "part"
        part.mkdir()
        sizes: list[int] = []
        labels: list[NDArray[Any]] = []
        held_back: list[bool] = []
        left_out: list[BadRowError] = []
        digest = hashlib.sha256()
        with (part / "payload.bin").open("wb") as payloads:
            for number, (example, is_validation) in enumerate(examples):
                if number % _NOTE_EVERY == 0:
                    progress(f"reading examples: {number:,} so far, {len(left_out):,} left out")
                if isinstance(example, BadRowError):
                    left_out.append(example)
                    continue
                payloads.write(example.payload)
                digest.update(example.payload)
                sizes.append(len(example.payload))
                labels.append(np.asarray(example.labels, np.int32))
                held_back.append(is_validation)
        has_validation_files = bool(config.validation_paths or getattr(config, "validation_folder", None))
        first = str(left_out[0]) if left_out else ""
        if not sum(sizes):
            why = f"all {len(left_out):,} of its rows are left out, the first because {first}" if left_out else ""
            raise EmptyCorpusError(
                f"data ({', '.join(config.paths) or 'folder'}) has no example. "
                f"{why or 'Name files with rows, or a folder with images.'}"
            )
        arrays = {
            "ends": np.cumsum(sizes, dtype=np.int64),
            "label_values": np.concatenate(labels),
            "label_ends": np.cumsum([len(label) for label in labels], dtype=np.int64),
            "is_validation": mark_held_back(held_back, has_validation_files),
        }
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", array)
            digest.update(array.tobytes())
        content = {"hash": digest.hexdigest(), "num_left_out": len(left_out), "first_left_out": first}
        (part / "content.json").write_text(json.dumps(content))
        with suppress(OSError):
            part.rename(directory)
    if not directory.is_dir():  # else another process was first, with the same
        raise OSError(f"{directory} was not made")
