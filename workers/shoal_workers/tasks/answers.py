"""Examples as tokens on disk, and the samples that they make.

    <cache_dir>/<kind>-<fingerprint>/      tokens.npy, is_answer.npy, ends.npy, is_validation.npy: made once per node,
                                           and complete once the directory has its name

    padded      | prompt  answer  padding ..... |       one example in a sample
    packed      | prompt  answer | prompt  answer | padding |    several; where positions begin at 0, nothing before
                                                        is seen

A sample has seq_len inputs and their next tokens as labels; -100 is no label: of prompts, and of padding. An example
that is longer is cut. One without an answer, or of which no answer is left, is left out and counted by reason. Which
examples share a sample is a function of the data and seq_len alone: the longest first, each into the sample that it
fills best. Called by the task.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shoal_workers.contract.text_data import ExamplesConfig
from shoal_workers.data.errors import CorpusTooSmallError
from shoal_workers.data.tokenizer import Split, held_back_examples, split_of
from shoal_workers.tasks.conversations import Encoder, Example, files_of, rows_in

NO_LABEL = -100
NO_ANSWER = "lines without an answer"
_VERSION = "4"
_NOTE_EVERY = 10_000


@dataclass(frozen=True, slots=True)
class Examples:
    """All examples of a job, one after the other."""

    tokens: NDArray[Any]
    """int32."""
    is_answer: NDArray[Any]
    ends: NDArray[Any]
    """The end of each example in both."""
    is_validation: NDArray[Any]
    """One flag for each example."""

    def example(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens, and which of them are answers."""
        begin = int(self.ends[number - 1]) if number else 0
        part = slice(begin, int(self.ends[number]))
        return self.tokens[part], self.is_answer[part]


Encode = Callable[[Encoder, dict[str, Any], str], tuple[Example, ...]]
"""Makes the examples of a row."""


def prepare_examples(
    config: ExamplesConfig, encoder: Encoder, progress: Callable[[str], None], encode: Encode, kind: str
) -> Examples:
    """Reads the files, or what was made of them before. Many processes of a node may call it together.

    Args:
        kind: names what `encode` makes of a line, and the directory.

    Raises:
        DataError: a file is missing, or a line has none of the forms.
    """
    train, validation = files_of(config.paths), files_of(config.validation_paths)
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else Path.home() / ".cache" / "shoal" / "data"
    place = cache / f"{kind}-{_fingerprint(config, encoder, train, validation)}"
    if not place.is_dir():
        _write(place, _encoded(config, partial(encode, encoder), train, validation, progress), bool(validation))
    names = ("tokens", "is_answer", "ends", "is_validation")
    return Examples(*(np.load(place / f"{name}.npy", mmap_mode="r") for name in names))


def _fingerprint(config: ExamplesConfig, encoder: Encoder, train: Sequence[Path], validation: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{_VERSION} {encoder.fingerprint} {config.max_examples}".encode())
    digest.update(f" {config.validation_fraction if not validation else None}".encode())
    for files in (train, validation):
        digest.update(b" split")
        for file in files:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:24]


def _encoded(
    config: ExamplesConfig,
    encode: Callable[[dict[str, Any], str], tuple[Example, ...]],
    train: Sequence[Path],
    validation: Sequence[Path],
    progress: Callable[[str], None],
) -> Iterator[tuple[Example, bool]]:
    """Every example, and whether it is for validation."""
    for files in (train, validation):
        for number, (row, place) in enumerate(rows_in(files)):
            if config.max_examples is not None and number >= config.max_examples:
                break
            if number % _NOTE_EVERY == 0:
                progress(f"reading examples: {number:,} so far")
            line = json.dumps(row, default=str).encode()
            is_held_back = not validation and split_of(line, config.validation_fraction) is Split.VALIDATION
            for example in encode(row, place):
                yield example, files is validation or is_held_back


def _write(place: Path, examples: Iterator[tuple[Example, bool]], has_validation_files: bool) -> None:
    tokens: list[NDArray[Any]] = []
    masks: list[NDArray[Any]] = []
    held_back: list[bool] = []
    for example, is_validation in examples:
        tokens.append(np.asarray(example.tokens, dtype=np.int32))
        masks.append(np.asarray(example.is_answer, dtype=np.bool_))
        held_back.append(is_validation)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="answers-part-") as folder:
        part = Path(folder) / "part"
        part.mkdir()
        np.save(part / "tokens.npy", np.concatenate(tokens) if tokens else np.zeros(0, np.int32))
        np.save(part / "is_answer.npy", np.concatenate(masks) if masks else np.zeros(0, np.bool_))
        np.save(part / "ends.npy", np.cumsum([len(token) for token in tokens], dtype=np.int64))
        np.save(part / "is_validation.npy", held_back_examples(held_back, has_validation_files))
        try:
            part.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was first, with the same
                raise


class AnswerDataset(Dataset[dict[str, Tensor]]):
    """Samples of a split: tokens, labels and positions, each (seq_len,) int64; with `max_tokens` of an own length."""

    def __init__(
        self,
        examples: Examples,
        split: Split,
        seq_len: int,
        padding: int,
        *,
        packing: bool,
        max_tokens: int | None = None,
    ) -> None:
        """Raises CorpusTooSmallError if the training split has no sample; a validation split may be empty."""
        self._examples = examples
        self._seq_len = seq_len
        self._padding = padding
        self.tokens_per_micro_batch = max_tokens
        self.left_out: Counter[str] = Counter()
        """Examples that are not read, by reason."""
        self.num_cut = 0
        """Examples that are longer than a sample."""
        lengths: dict[int, int] = {}
        for number in np.flatnonzero(examples.is_validation == (split is Split.VALIDATION)).tolist():
            _, is_answer = examples.example(number)
            if is_answer[1 : seq_len + 1].any():
                lengths[number] = min(len(is_answer) - 1, seq_len)
                self.num_cut += len(is_answer) - 1 > seq_len
            else:
                self.left_out[f"{NO_ANSWER} within model.seq_len {seq_len}" if is_answer[1:].any() else NO_ANSWER] += 1
        self._samples = packed(lengths, seq_len) if packing else [(number,) for number in lengths]
        self.lengths = np.asarray(list(lengths.values()), np.int64) if max_tokens is not None else None
        """Tokens of each sample, if they differ."""
        if not self._samples and split is Split.TRAIN:
            raise no_samples(len(examples.ends), self.left_out)
        digest = hashlib.sha256(f"{split} {seq_len} {packing}".encode())
        for part in (examples.tokens, examples.is_answer, examples.ends, examples.is_validation):
            digest.update(np.ascontiguousarray(part).data)
        self.content_hash = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        room = self._seq_len if self.lengths is None else int(self.lengths[index])
        tokens = torch.full((room,), self._padding, dtype=torch.int64)
        labels = torch.full_like(tokens, NO_LABEL)
        positions = torch.zeros_like(tokens)
        filled = 0
        for number in self._samples[index]:
            own, is_answer = (np.asarray(part[: self._seq_len + 1]) for part in self._examples.example(number))
            end = filled + len(own) - 1
            tokens[filled:end] = torch.from_numpy(own[:-1].astype(np.int64))
            labels[filled:end] = torch.from_numpy(np.where(is_answer[1:], own[1:], NO_LABEL).astype(np.int64))
            positions[filled:end] = torch.arange(len(own) - 1)
            filled = end
        positions[filled:] = torch.arange(room - filled)
        return {"tokens": tokens, "labels": labels, "positions": positions}


def no_samples(num_lines: int, left_out: Mapping[str, int]) -> CorpusTooSmallError:
    """The training split has no sample."""
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items())
    return CorpusTooSmallError(
        f"data.paths have {num_lines:,} lines, and none of the training split can be learned from: "
        f"{reasons or 'all are for validation'}. Add lines with an answer (a completion, or a turn of the role "
        '"assistant"), lower data.validation_fraction, or raise model.seq_len.'
    )


def padded_batch(samples: Sequence[dict[str, Tensor]], padding: int) -> dict[str, Tensor]:
    """One batch of samples of any lengths, each filled up to the longest: tensors (samples, ..., longest)."""
    longest = max(sample["tokens"].shape[-1] for sample in samples)

    def filled(name: str) -> Tensor:
        fill = {"tokens": padding, "labels": NO_LABEL}.get(name, 0)
        return torch.stack(
            [F.pad(sample[name], (0, longest - sample[name].shape[-1]), value=fill) for sample in samples]
        )

    return {name: filled(name) for name in samples[0]}


def packed(lengths: dict[int, int], seq_len: int) -> list[tuple[int, ...]]:
    """Which examples share a sample, by their lengths: the longest first, each into the sample with the least room that
    it fits into (best fit decreasing, Johnson 1974)."""
    samples: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """Room and number of each sample, sorted."""
    for number in sorted(lengths, key=lambda index: (-lengths[index], index)):
        place = bisect_left(rooms, (lengths[number], -1))
        if place < len(rooms):
            room, sample = rooms.pop(place)
        else:
            room, sample = seq_len, len(samples)
            samples.append([])
        samples[sample].append(number)
        insort(rooms, (room - lengths[number], sample))
    return [tuple(sample) for sample in samples]
