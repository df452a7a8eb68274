"""Examples as tokens on disk, and the samples that they make.

    <cache_dir>/<kind>-<fingerprint>/      made once per node (data/labelled.py); the payload of an example is its
                                           tokens, int32, and then a flag for each: it is part of an answer

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
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
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
from shoal_workers.data.labelled import Labelled, LabelledExamples, prepare
from shoal_workers.data.tokenizer import Split, split_of
from shoal_workers.tasks.conversations import Encoder, Example, files_of, rows_in
from shoal_workers.tasks.rows import NO_LABEL

NO_ANSWER = "lines without an answer"
_TOKEN_BYTES, _FLAG_BYTES = 4, 1


Encode = Callable[[Encoder, dict[str, Any], str], tuple[Example, ...]]
"""Makes the examples of a row."""


def prepare_examples(
    config: ExamplesConfig, encoder: Encoder, progress: Callable[[str], None], encode: Encode, kind: str
) -> LabelledExamples:
    """Reads the files, or what was made of them before. Many processes of a node may call it together.

    Args:
        kind: names what `encode` makes of a line, and the directory.

    Raises:
        DataError: a file is missing, or a line has none of the forms.
    """
    splits = files_of(config.paths), files_of(config.validation_paths)
    described = {
        "encoder": encoder.fingerprint,
        "max_examples": config.max_examples,
        "validation_fraction": None if config.validation_paths else config.validation_fraction,
        "files": [[_digest(file) for file in files] for files in splits],
    }
    return prepare(config, kind, described, _encoded(config, partial(encode, encoder), *splits), progress)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _encoded(
    config: ExamplesConfig,
    encode: Callable[[dict[str, Any], str], tuple[Example, ...]],
    train: Sequence[Path],
    validation: Sequence[Path],
) -> Iterator[tuple[Labelled, bool]]:
    """Every example, and whether it is for validation."""
    for files in (train, validation):
        for row, place in islice(rows_in(files), config.max_examples):
            line = json.dumps(row, default=str).encode()
            is_held_back = not validation and split_of(line, config.validation_fraction) is Split.VALIDATION
            for example in encode(row, place):
                tokens, flags = np.asarray(example.tokens, "<i4"), np.asarray(example.is_answer, np.bool_)
                yield Labelled(tokens.tobytes() + flags.tobytes(), ()), files is validation or is_held_back


def example_of(examples: LabelledExamples, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Tokens of an example, and which of them are answers."""
    payload, _ = examples.of(number)
    count = len(payload) // (_TOKEN_BYTES + _FLAG_BYTES)
    return np.frombuffer(payload, "<i4", count), np.frombuffer(payload, np.bool_, count, _TOKEN_BYTES * count)


class AnswerDataset(Dataset[dict[str, Tensor]]):
    """Samples of a split: tokens, labels and positions, each (seq_len,) int64; with `max_tokens` of an own length."""

    def __init__(
        self,
        examples: LabelledExamples,
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
        for number in examples.numbers(split).tolist():
            _, is_answer = example_of(examples, number)
            if is_answer[1 : seq_len + 1].any():
                lengths[number] = min(len(is_answer) - 1, seq_len)
                self.num_cut += len(is_answer) - 1 > seq_len
            else:
                self.left_out[f"{NO_ANSWER} within model.seq_len {seq_len}" if is_answer[1:].any() else NO_ANSWER] += 1
        self._samples = packed(lengths, seq_len) if packing else [(number,) for number in lengths]
        self.lengths = np.asarray(list(lengths.values()), np.int64) if max_tokens is not None else None
        """Tokens of each sample, if they differ."""
        if not self._samples and split is Split.TRAIN:
            raise no_samples(len(examples), self.left_out)
        described = f"{examples.content_hash} {split} {seq_len} {packing}"
        self.content_hash = hashlib.sha256(described.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        room = self._seq_len if self.lengths is None else int(self.lengths[index])
        tokens = torch.full((room,), self._padding, dtype=torch.int64)
        labels = torch.full_like(tokens, NO_LABEL)
        positions = torch.zeros_like(tokens)
        filled = 0
        for number in self._samples[index]:
            own, is_answer = (np.asarray(part[: self._seq_len + 1]) for part in example_of(self._examples, number))
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
