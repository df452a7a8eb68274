"""The built-in task: a language model on text. It uses the task contract exactly as a user's own task does.

`prepare` makes the token shards (once per node), `build_dataset` memory-maps them, `build_model` draws the weights from
torch's global generator, `loss` is the mean cross entropy of the next token in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.lm import LanguageModelConfig, TextDataConfig
from shoal_workers.data.dataset import TokenDataset
from shoal_workers.data.index import Corpus, Split
from shoal_workers.data.prepare import prepare_corpus
from shoal_workers.data.tokenizer import ByteTokenizer, load_tokenizer
from shoal_workers.tasks.transformer import Transformer


class LanguageModel:
    """A decoder-only transformer that learns to predict the next token of a text corpus."""

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.config = LanguageModelConfig.model_validate(model)
        self.text = TextDataConfig.model_validate(data)
        self.seed = seed
        self._corpus: Corpus | None = None

    @property
    def tokens_per_sample(self) -> int:
        return self.config.seq_len

    @property
    def bytes_per_token(self) -> float | None:
        """1.0 for bytes; else measured on the corpus, so None before `prepare`."""
        if self.text.tokenizer == ByteTokenizer.name:
            return 1.0
        return self._corpus.bytes_per_token if self._corpus else None

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Make the token shards unless they are there, and verify them. Many processes of one node may call at once."""
        self._corpus = prepare_corpus(self.text, lambda state: progress(state.describe()))

    def build_model(self) -> nn.Module:
        """The model, with weights from torch's global generator.

        Raises:
            ValueError: model.vocab_size is smaller than the tokenizer's vocabulary.
        """
        needed = load_tokenizer(self.text.tokenizer).vocab_size
        vocab_size = self.config.vocab_size or needed
        if vocab_size < needed:
            raise ValueError(
                f"model.vocab_size {vocab_size} is smaller than the {needed} tokens of data.tokenizer "
                f"{self.text.tokenizer!r}. Leave model.vocab_size out, or set it to at least {needed}."
            )
        return Transformer(self.config, vocab_size)

    def build_dataset(self, split: str) -> TokenDataset:
        """Samples of seq_len + 1 tokens, int64; "train" or "validation".

        Raises:
            DataError: the text cannot be read, or has not one sample for training.
        """
        if self._corpus is None:
            self.prepare(lambda _: None)
        assert self._corpus is not None
        return TokenDataset(self._corpus, Split(split), self.config.seq_len)

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Samples (T + 1,) -> tokens (B, T), the tokens that follow each, `labels` (B, T), and their positions (T,).

        Named and apart, so that context parallelism can give each rank some of the positions.
        """
        whole = torch.stack(samples)
        return {"tokens": whole[:, :-1], "labels": whole[:, 1:], "positions": torch.arange(whole.shape[1] - 1)}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean next-token cross entropy (nats) of a batch of `collate`; computed in fp32.

        The logits may be a DTensor whose vocabulary is split, inside torch's `loss_parallel`: only what works there.
        """
        logits: Tensor = model(batch["tokens"], batch["positions"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    def shard_units(self, model: nn.Module) -> Iterable[nn.Module]:
        """The blocks, each gathered on its own; embedding, last norm and head stay with the root."""
        assert isinstance(model, Transformer)
        return list(model.blocks)
