"""The task that trains an encoder with a decoder of transformers (T5, BART) on pairs of texts.

    task: shoal_workers.tasks.seq2seq:SequenceToSequence
    model: {path: /models/tiny-t5, seq_len: 512, target_len: 128}
    data: {paths: [/pairs/*.jsonl], prefix: "summarize: "}            {"source": text, "target": text}

Both texts have the tokens that the tokenizer puts around a text. What the decoder reads is the target, shifted right
behind `decoder_start_token_id`, as transformers does it. Loaded by the engine by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal_workers.contract.text_data import PairsConfig, Seq2SeqModelConfig
from shoal_workers.data.labelled import Labelled, prepare_rows
from shoal_workers.data.records import Record
from shoal_workers.data.tokenizer import Tokenizer, load_tokenizer
from shoal_workers.tasks.pretrained import Network, refuse_small_vocabulary
from shoal_workers.tasks.rows import NO_LABEL, RowSamples, RowTask, padded, read_text, read_tokens, summed_cross_entropy


class DecoderTask(RowTask):
    """A model of transformers with a decoder, whose labels are the tokens of a text."""

    _decoder: DecoderTokens | None = None

    def build_model(self) -> nn.Module:
        """See PretrainedModel. ValueError: the model has fewer tokens than the tokenizer, or its config does not say
        what a decoder reads first."""
        network = self.build_network()
        refuse_small_vocabulary(network.config.vocab_size, self.tokenizer)
        self._decoder = DecoderTokens(network.config)
        return Network(network)

    def cross_entropy(self, model: nn.Module, labels: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the cross entropies (nats) of labels (B, T), and the number of their tokens. `inputs`:
        those of the encoder."""
        assert self._decoder is not None, "build_model comes first"
        logits = model(**inputs, decoder_input_ids=self._decoder.before(labels), use_cache=False)
        return summed_cross_entropy(logits, labels)


class SequenceToSequence(DecoderTask):
    """Targets of sources."""

    auto_class = "AutoModelForSeq2SeqLM"
    exported_files = ("generation_config.json",)

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.settings = Seq2SeqModelConfig.model_validate(model)
        super().__init__(self.settings)
        self.pairs = PairsConfig.model_validate(data)
        self.tokenizer = self.pairs.tokenizer or self.own_tokenizer()

    @property
    def tokens_per_sample(self) -> int:
        return self.settings.seq_len + self.settings.target_len

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Tokenise the pairs, unless that was done before."""
        tokenizer = load_tokenizer(self.tokenizer)
        self._examples = prepare_rows(
            self.pairs,
            (self.pairs.source_field, self.pairs.target_field),
            "pairs",
            [tokenizer.fingerprint, self.pairs.prefix, self.settings.seq_len, self.settings.target_len],
            lambda record: self._encoded(record, tokenizer),
            progress,
        )

    def _encoded(self, record: Record, tokenizer: Tokenizer) -> Labelled:
        source = self.pairs.prefix + read_text(record.values[0], record.place, "source_field")
        tokens = read_tokens(source, record.place, "source_field", tokenizer, self.settings.seq_len)
        labels = read_tokens(record.values[1], record.place, "target_field", tokenizer, self.settings.target_len)
        return Labelled(np.asarray(tokens, "<i4").tobytes(), labels)

    def build_dataset(self, split: str) -> RowSamples:
        """Samples: `tokens` and `is_token` (seq_len,), `labels` (target_len,); "train" or "validation".

        Raises:
            DataError: the files cannot be read, or have no sample for training.
        """
        return RowSamples(self.examples(), split, self._sample)

    def _sample(self, payload: bytes, labels: NDArray[Any]) -> dict[str, Tensor]:
        tokens = np.frombuffer(payload, "<i4")
        return {
            "tokens": padded(tokens, self.settings.seq_len, self.padding),
            "is_token": padded(np.ones(len(tokens)), self.settings.seq_len, 0),
            "labels": padded(labels, self.settings.target_len, NO_LABEL),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `cross_entropy`: a step's loss is the mean over all tokens of targets in it."""
        tokens, is_token = batch["tokens"], batch["is_token"]
        return self.cross_entropy(model, batch["labels"], input_ids=tokens, attention_mask=is_token)


class DecoderTokens:
    """What a decoder reads where labels are to be predicted."""

    def __init__(self, config: Any) -> None:
        """ValueError: the config does not say what is read first, or what fills a sample."""
        self.start, self._padding = (_token(config, name) for name in ("decoder_start_token_id", "pad_token_id"))

    def before(self, labels: Tensor) -> Tensor:
        """Labels (B, T) -> the tokens before each of them, (B, T)."""
        shifted = torch.cat([torch.full_like(labels[:, :1], self.start), labels[:, :-1]], 1)
        return shifted.masked_fill(shifted == NO_LABEL, self._padding)


def _token(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ValueError(
            f"the model's config has {name} {value!r}, and the decoder needs a token there. Set it in model.config, or "
            "in config.json of model.path."
        )
    return value
