"""Reads samples of a split from memory-mapped shards. There is no position: sample i is always the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shoal_workers.data.concatenation import locate
from shoal_workers.data.corpus import Corpus
from shoal_workers.data.errors import CorpusTooSmallError
from shoal_workers.data.tokenizer import Split


class TokenDataset(Dataset[Tensor]):
    """Samples of a split: tensors of shape (seq_len + 1,), int64.

    Sample i has the tokens i x seq_len to (i + 1) x seq_len of the split, both included. Consecutive samples share one
    token: the last target of one is the first input of the next. A sample may continue from one shard into the next.
    """

    def __init__(self, corpus: Corpus, split: Split, seq_len: int) -> None:
        """Map the split. If the tokens of the training split make no sample, it gets those of all splits.

        Raises:
            CorpusTooSmallError: the training split has no sample; a validation split may be empty.
        """
        self.seq_len = seq_len
        self.content_hash = corpus.index.content_hash
        self._corpus = corpus
        splits = [split]
        if corpus.index.num_tokens(Split.TRAIN) <= seq_len:  # a text of few documents
            splits = [*Split] if split is Split.TRAIN else []
        self._sections = _map_splits(corpus, splits)
        self._ends = list(accumulate(len(section) for section in self._sections))
        num_tokens = self._ends[-1] if self._ends else 0
        self._num_samples = max(0, (num_tokens - 1) // seq_len)
        if not self._num_samples and split is Split.TRAIN:
            raise CorpusTooSmallError(
                f"the training text has {num_tokens:,} tokens, but one sample needs model.seq_len + 1 = "
                f"{seq_len + 1:,}. Add text, or lower model.seq_len."
            )

    def content_parts(self) -> dict[str, str]:
        """Return the hash of each shard, by its path and source files."""
        return {self._corpus.describe_shard(n): entry.tokens_hash for n, entry in enumerate(self._corpus.index.shards)}

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        return torch.from_numpy(self._read(index * self.seq_len, self.seq_len + 1).astype(np.int64))

    def _read(self, start: int, length: int) -> NDArray[Any]:
        pieces = []
        number, offset = locate(self._ends, start)
        while length:
            piece = self._sections[number][offset : offset + length]
            pieces.append(piece)
            length -= len(piece)
            number, offset = number + 1, 0
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _map_splits(corpus: Corpus, splits: Sequence[Split]) -> list[NDArray[Any]]:
    """Map the tokens of neighbouring splits, shard by shard."""
    dtype = np.dtype(corpus.index.dtype)
    sections: list[NDArray[Any]] = []
    for number, entry in enumerate(corpus.index.shards):
        if num_tokens := sum(entry.num_tokens[split] for split in splits):
            first = 0 if Split.TRAIN in splits else entry.num_tokens[Split.TRAIN]
            sections.append(
                np.memmap(
                    corpus.shard_path(number),
                    dtype=dtype,
                    mode="r",
                    offset=first * dtype.itemsize,
                    shape=(num_tokens,),
                )
            )
    return sections
