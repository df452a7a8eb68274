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

`ExamplesTask` is what the tasks share that train a model of transformers on lines with answers: the tokenizer, the
tokens on disk, and how samples become a batch. It hides when the lines are tokenised. A task says what a line is
(`encode`, with a `kind` that names it) and makes samples of the examples.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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

from shoal_workers.contract.hugging_face import TOKENIZER_NAME, HuggingFaceConfig
from shoal_workers.contract.text_data import BYTE_TOKENIZER, ExamplesConfig
from shoal_workers.data.errors import CorpusTooSmallError
from shoal_workers.data.labelled import Labelled, LabelledExamples, describe_files, prepare
from shoal_workers.data.sources import SourceFile
from shoal_workers.data.tokenizer import Split, choose_split
from shoal_workers.tasks.conversations import Encoder, Example, find_row_files, load_encoder, read_file_rows
from shoal_workers.tasks.hf import HuggingFaceModel
from shoal_workers.tasks.rows import NO_LABEL

NO_ANSWER = "lines without an answer"
_TOKEN_BYTES, _FLAG_BYTES = 4, 1


Encode = Callable[[Encoder, dict[str, Any], str], tuple[Example, ...]]
"""Makes the examples of a row."""


def prepare_examples(
    config: ExamplesConfig, encoder: Encoder, progress: Callable[[str], None], encode: Encode, kind: str
) -> LabelledExamples:
    """Read the files, or what was made of them before. Many processes of a node may call it together.

    Args:
        kind: names what `encode` makes of a line, and the directory.

    Raises:
        DataError: a file is missing, or a line has none of the forms.
    """
    splits = find_row_files(config.paths), find_row_files(config.validation_paths)
    described = {
        "encoder": encoder.fingerprint,
        "max_examples": config.max_examples,
        "validation_fraction": None if config.validation_paths else config.validation_fraction,
        "files": [describe_files(files) for files in splits],
    }
    return prepare(config, kind, described, _encoded(config, partial(encode, encoder), *splits), progress)


def _encoded(
    config: ExamplesConfig,
    encode: Callable[[dict[str, Any], str], tuple[Example, ...]],
    train: Sequence[SourceFile],
    validation: Sequence[SourceFile],
) -> Iterator[tuple[Labelled, bool]]:
    """Every example, and whether it is for validation."""
    for files in (train, validation):
        for row, place in islice(read_file_rows(files), config.max_examples):
            line = json.dumps(row, default=str).encode()
            is_held_back = not validation and choose_split(line, config.validation_fraction) is Split.VALIDATION
            for example in encode(row, place):
                tokens, flags = np.asarray(example.tokens, "<i4"), np.asarray(example.is_answer, np.bool_)
                yield Labelled(tokens.tobytes() + flags.tobytes(), ()), files is validation or is_held_back


def read_example(examples: LabelledExamples, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the tokens of an example, and which of them are answers."""
    payload, _ = examples.read(number)
    count = len(payload) // (_TOKEN_BYTES + _FLAG_BYTES)
    return np.frombuffer(payload, "<i4", count), np.frombuffer(payload, np.bool_, count, _TOKEN_BYTES * count)


class ExampleDataset(Dataset[dict[str, Tensor]]):
    """Samples of one or several examples each. A subclass chooses the examples, and calls `_set_samples`."""

    lengths: NDArray[Any] | None = None
    """Tokens of each sample, if they differ."""

    def __init__(
        self, examples: LabelledExamples, split: Split, seq_len: int, padding: int, max_tokens: int | None
    ) -> None:
        self._examples = examples
        self._split = split
        self._seq_len = seq_len
        self._padding = padding
        self.tokens_per_micro_batch = max_tokens
        self.left_out: Counter[str] = Counter()
        """Lines that are not read, by reason."""
        self.num_cut = 0
        """Lines that are longer than a sample."""
        self._samples: Sequence[tuple[int, ...]] = []

    def _set_samples(
        self, samples: Sequence[tuple[int, ...]], lengths: Sequence[int], num_lines: int, settings: str
    ) -> None:
        """`samples`: the numbers of their examples. `settings`: all that they depend on, in words.

        Raises CorpusTooSmallError if the training split has no sample; a validation split may be empty."""
        if not samples and self._split is Split.TRAIN:
            reasons = ", ".join(f"{reason}: {number:,}" for reason, number in self.left_out.items())
            raise CorpusTooSmallError(
                f"data.paths have {num_lines:,} lines, and none of the training split can be learned from: "
                f"{reasons or 'all are for validation'}. Add lines with an answer (a completion, or a turn of the role "
                '"assistant"), lower data.validation_fraction, or raise model.seq_len.'
            )
        self._samples = samples
        if self.tokens_per_micro_batch is not None:
            self.lengths = np.asarray(lengths, np.int64)
        self.content_hash = hashlib.sha256(f"{self._examples.content_hash} {settings}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._samples)

    def _read(self, number: int) -> dict[str, Tensor]:
        """Return the tokens and the labels of an example, without padding."""
        tokens, is_answer = (part[: self._seq_len + 1] for part in read_example(self._examples, number))
        return {
            "tokens": torch.from_numpy(tokens[:-1].astype(np.int64)),
            "labels": torch.from_numpy(np.where(is_answer[1:], tokens[1:], NO_LABEL).astype(np.int64)),
        }


class AnswerDataset(ExampleDataset):
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
        super().__init__(examples, split, seq_len, padding, max_tokens)
        lengths: dict[int, int] = {}
        for number in examples.numbers(split).tolist():
            _, is_answer = read_example(examples, number)
            if is_answer[1 : seq_len + 1].any():
                lengths[number] = min(len(is_answer) - 1, seq_len)
                self.num_cut += len(is_answer) - 1 > seq_len
            else:
                self.left_out[f"{NO_ANSWER} within model.seq_len {seq_len}" if is_answer[1:].any() else NO_ANSWER] += 1
        samples = packed(lengths, seq_len) if packing else [(number,) for number in lengths]
        self._set_samples(samples, [*lengths.values()], len(examples), f"{split} {seq_len} {packing}")

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        parts = [self._read(number) for number in self._samples[index]]
        size = self._seq_len if self.lengths is None else int(self.lengths[index])
        rest = size - sum(len(part["tokens"]) for part in parts)
        parts.append({"tokens": torch.full((rest,), self._padding), "labels": torch.full((rest,), NO_LABEL)})
        sample = {name: torch.cat([part[name] for part in parts]) for name in ("tokens", "labels")}
        return {**sample, "positions": torch.cat([torch.arange(len(part["tokens"])) for part in parts])}


def pad_batch(samples: Sequence[dict[str, Tensor]], padding: int, size: int | None = None) -> dict[str, Tensor]:
    """Make one batch of samples of any lengths: tensors (samples, ..., size). `size`: None means the longest one's."""
    if size is None:
        size = max(sample["tokens"].shape[-1] for sample in samples)

    def pad(name: str) -> Tensor:
        fill = {"tokens": padding, "labels": NO_LABEL}.get(name, 0)
        return torch.stack([F.pad(sample[name], (0, size - sample[name].shape[-1]), value=fill) for sample in samples])

    return {name: pad(name) for name in samples[0]}


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


class ExamplesTask(HuggingFaceModel):
    """A model of transformers, and lines of text or of messages."""

    def __init__(self, settings: HuggingFaceConfig, lines: ExamplesConfig, encode: Encode, kind: str) -> None:
        super().__init__(settings)
        self.lines = lines
        self._encode = encode
        self._kind = kind
        self._directory = lines.tokenizer or settings.path or BYTE_TOKENIZER
        is_bytes = self._directory == BYTE_TOKENIZER
        self.tokenizer = BYTE_TOKENIZER if is_bytes else str(Path(self._directory).expanduser() / TOKENIZER_NAME)
        self._encoder: Encoder | None = None
        self._examples: LabelledExamples | None = None

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Tokenise the files, unless that was done before."""
        self._encoder = load_encoder(self._directory)
        self._examples = prepare_examples(self.lines, self._encoder, progress, self._encode, self._kind)

    def prepared(self) -> tuple[LabelledExamples, int]:
        """Return the examples, and the token that fills samples. DataError: the files cannot be read."""
        if self._examples is None:
            self.prepare(lambda _: None)
        assert self._examples is not None and self._encoder is not None
        return self._examples, self._encoder.padding

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Pad samples of several lengths to the longest of them."""
        _, padding = self.prepared()
        return pad_batch(samples, padding)
