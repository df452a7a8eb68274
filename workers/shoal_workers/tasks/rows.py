"""The data half of tasks that learn from rows: examples on disk as samples, padded to one size.

    RowTask                      --  prepare()              ->  examples on disk
    Examples (data/labelled.py)  --  read(payload, labels)  ->  sample, a dict of tensors

Called by the tasks for pairs, labelled texts, images and speech.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shoal_workers.contract.batch_partition import sample_at
from shoal_workers.data.errors import BadRowError, CorpusTooSmallError
from shoal_workers.data.labelled import LabelledExamples
from shoal_workers.data.tokenizer import Split, Tokenizer
from shoal_workers.tasks.pretrained import PretrainedModel

NO_LABEL = -100


class RowTask(PretrainedModel):
    """A model of transformers that learns from rows. `prepare` of the task makes the examples."""

    _examples: LabelledExamples | None = None

    def prepare(self, progress: Callable[[str], None]) -> None:
        raise NotImplementedError

    def examples(self) -> LabelledExamples:
        """Return the examples, made if that was not done before. DataError: the files cannot be read."""
        if self._examples is None:
            self.prepare(lambda _: None)
        assert self._examples is not None
        return self._examples


class RowSamples(Dataset[dict[str, Tensor]]):
    """The samples of a split."""

    def __init__(
        self,
        examples: LabelledExamples,
        split: str,
        read: Callable[[bytes, NDArray[Any]], dict[str, Tensor]],
        settings: str = "",
    ) -> None:
        """`settings`: all that `read` depends on, in words. Raises CorpusTooSmallError if the training split has no
        sample; a validation split may be empty."""
        self._examples = examples
        self._split = Split(split)
        self._numbers = examples.numbers(self._split)
        self._read = read
        if not len(self._numbers) and self._split is Split.TRAIN:
            raise CorpusTooSmallError(
                f"data has {len(examples):,} examples, and none of them is in the training split. Add some, or lower "
                "data.validation_fraction."
            )
        why = f"examples that cannot be read (the first: {examples.first_left_out})"
        self.left_out = {why: examples.num_left_out} if examples.num_left_out and self._split is Split.TRAIN else {}
        described = f"{examples.content_hash} {split} {settings}"
        self.content_hash = hashlib.sha256(described.encode()).hexdigest()

    def label_counts(self) -> dict[int, int]:
        """How many samples have each label; empty if a sample has several or none."""
        return self._examples.label_counts(self._split)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self._numbers):
            raise IndexError(f"sample {index} of {len(self._numbers)}")
        return self._read(*self._examples.read(int(self._numbers[index])))


class FlippedSamples(Dataset[dict[str, Tensor]]):
    """Images of a training split, every second one mirrored: a coin for each position of the run, from the seed."""

    def __init__(self, samples: RowSamples, seed: int) -> None:
        self._samples = samples
        self._seed = seed & 0xFFFFFFFFFFFFFFFF
        self.label_counts, self.left_out = samples.label_counts, samples.left_out
        self.content_hash = hashlib.sha256(f"{samples.content_hash} flipped {seed}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._samples)

    def samples_at(self, positions: range, seed: int) -> list[int]:
        """Return the samples at these positions of the run, each with its position, which decides."""
        size = len(self._samples)
        return [position * size + sample_at(position, num_samples=size, seed=seed) for position in positions]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self._samples[index % len(self._samples)]
        word = np.random.Philox(key=np.array([self._seed, index & 0xFFFFFFFFFFFFFFFF], np.uint64)).random_raw()
        return {**sample, "pixels": sample["pixels"].flip(-1)} if int(word) & 1 else sample


def padded(values: Sequence[int] | NDArray[Any], size: int, padding: int) -> Tensor:
    """(size,) int64."""
    tensor = torch.full((size,), padding, dtype=torch.int64)
    tensor[: len(values)] = torch.as_tensor(np.asarray(values, np.int64)[:size])
    return tensor


def read_text(value: Any, place: str, key: str) -> str:
    """A text of a row. BadRowError: it is none."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise BadRowError(f"{place}: data.{key} is not UTF-8: {error}. Convert the file.") from error
    if not isinstance(value, str):
        raise BadRowError(f"{place}: data.{key} is {type(value).__name__}, not text. Name the field of the text in it.")
    return value


def read_tokens(value: Any, place: str, key: str, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """Return the tokens of a text of a row. BadRowError: it is no text, or has no token."""
    tokens = tokenizer.encode_whole(read_text(value, place, key), max_tokens)
    if not tokens:
        raise BadRowError(f"{place}: data.{key} is an empty text. Remove the row.")
    return tokens


def read_class(value: Any, place: str, classes: Sequence[str], num_labels: int) -> int:
    """Return the number of a class of a row. A number and its digits are the same label, as files of text (CSV) have
    digits only; if a class has digits as its name, a label is always a name. BadRowError: there is no such class."""
    label = value if isinstance(value, str) else json.dumps(value, default=str)
    if label in classes:
        return classes.index(label)
    has_digits = any(name.isdecimal() for name in classes)
    if has_digits or not label.isdecimal() or not int(label) < num_labels:
        names = f"one of {', '.join(map(repr, classes[:8]))}{' ...' if len(classes) > 8 else ''}" if classes else ""
        numbers = "" if has_digits else f"a number from 0 to {num_labels - 1}"
        raise BadRowError(
            f"{place}: data.label_field is {value!r}, and the model has {num_labels} classes: a label is "
            f"{', or '.join(filter(None, (numbers, names)))}. Set model.num_labels and data.classes."
        )
    return int(label)


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropies (nats) of all labels, in fp32, and their number; NO_LABEL is none. Logits
    (..., V), labels (...)."""
    flat = labels.flatten()
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2).float(), flat, ignore_index=NO_LABEL, reduction="sum"
    )
    return total, torch.count_nonzero(flat != NO_LABEL)
