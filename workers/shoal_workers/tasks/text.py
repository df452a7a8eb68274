"""The common part of tasks that train on a text corpus: preparing its token shards, reading samples from them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.corpus import Corpus
from shoal_workers.data.mixture import Mixture, TokenDataset, ValidationMixture
from shoal_workers.data.prepare import named_source, prepare_corpora
from shoal_workers.data.tokenizer import ByteTokenizer, Split, load_tokenizer


class TextTask:
    """The data half of a task: samples of `seq_len` tokens, and the token that follows each."""

    def __init__(self, text: TextDataConfig, seq_len: int) -> None:
        self.text = text
        self.tokenizer = text.tokenizer
        self._seq_len = seq_len
        self._corpora: list[Corpus] = []

    @property
    def tokens_per_sample(self) -> int:
        return self._seq_len

    @property
    def bytes_per_token(self) -> float | None:
        """1.0 for the byte tokenizer; else measured on the corpus, so None before `prepare`. Of a mixture: that of its
        samples, in their shares."""
        if self.tokenizer == ByteTokenizer.name:
            return 1.0
        if not self._corpora:
            return None
        if not self.text.sources:
            return self._corpora[0].bytes_per_token
        shares = self._mixture().order.shares
        weighted = (share * corpus.bytes_per_token for share, corpus in zip(shares, self._corpora, strict=True))
        return sum(weighted) / sum(shares)

    @property
    def remarks(self) -> list[str]:
        """Sentences for the job's log."""
        if load_tokenizer(self.tokenizer).end_of_document is not None:
            return []
        return [
            f"data.tokenizer {self.tokenizer!r} names no token that ends a document, so documents run together. "
            "Name it as eos_token in a tokenizer_config.json beside it."
        ]

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Write the token shards if they are missing, and verify them. Many workers of one node may call it
        together."""
        self._corpora = prepare_corpora(self.text, lambda state: progress(state.describe()))

    def build_dataset(self, split: str) -> TokenDataset | Mixture | ValidationMixture:
        """Samples of seq_len + 1 tokens, int64; "train" or "validation". A mixture has an order of its own.

        Raises:
            DataError: the text cannot be read, or has no sample for training.
        """
        if not self._corpora:
            self.prepare(lambda _: None)
        if not self.text.sources:
            return TokenDataset(self._corpora[0], Split(split), self._seq_len)
        mixture = self._mixture()
        return mixture if Split(split) is Split.TRAIN else ValidationMixture(self._of(split), mixture.order.shares)

    def _mixture(self) -> Mixture:
        return Mixture(self._of(Split.TRAIN), self.text.sources)

    def _of(self, split: str) -> list[TokenDataset]:
        """Return the samples of each source."""
        parts = []
        for number, corpus in enumerate(self._corpora):
            with named_source(self.text, number):
                parts.append(TokenDataset(corpus, Split(split), self._seq_len))
        return parts

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Samples (T + 1,) -> tokens (B, T), the tokens that follow each, `labels` (B, T), and their positions (T,).

        They are separate entries, so that context parallelism can give each rank some of the positions.
        """
        whole = torch.stack(samples)
        return {"tokens": whole[:, :-1], "labels": whole[:, 1:], "positions": torch.arange(whole.shape[1] - 1)}
