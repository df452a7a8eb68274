"""The common part of tasks that train on a text corpus: preparing its token shards, reading samples from them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal_workers.contract.model import TextDataConfig
from shoal_workers.data.corpus import Corpus
from shoal_workers.data.dataset import TokenDataset
from shoal_workers.data.prepare import prepare_corpus
from shoal_workers.data.tokenizer import ByteTokenizer, Split


class TextTask:
    """The data half of a task: samples of `seq_len` tokens, and the token that follows each."""

    def __init__(self, text: TextDataConfig, seq_len: int) -> None:
        self.text = text
        self._seq_len = seq_len
        self._corpus: Corpus | None = None

    @property
    def tokens_per_sample(self) -> int:
        return self._seq_len

    @property
    def bytes_per_token(self) -> float | None:
        """1.0 for the byte tokenizer; else measured on the corpus, so None before `prepare`."""
        if self.text.tokenizer == ByteTokenizer.name:
            return 1.0
        return self._corpus.bytes_per_token if self._corpus else None

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Write the token shards if they are missing, and verify them. Many workers of one node may call it
        together."""
        self._corpus = prepare_corpus(self.text, lambda state: progress(state.describe()))

    def build_dataset(self, split: str) -> TokenDataset:
        """Samples of seq_len + 1 tokens, int64; "train" or "validation".

        Raises:
            DataError: the text cannot be read, or has no sample for training.
        """
        if self._corpus is None:
            self.prepare(lambda _: None)
        assert self._corpus is not None
        return TokenDataset(self._corpus, Split(split), self._seq_len)

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Samples (T + 1,) -> tokens (B, T), the tokens that follow each, `labels` (B, T), and their positions (T,).

        They are separate entries, so that context parallelism can give each rank some of the positions.
        """
        whole = torch.stack(samples)
        return {"tokens": whole[:, :-1], "labels": whole[:, 1:], "positions": torch.arange(whole.shape[1] - 1)}
