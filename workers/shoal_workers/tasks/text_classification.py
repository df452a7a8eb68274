"""The task that trains a classifier of texts of transformers (BERT, RoBERTa, ModernBERT) on labelled texts.

    task: shoal_workers.tasks.text_classification:TextClassification
    model: {path: /models/tiny-bert, seq_len: 128, num_labels: 2}
    data: {paths: [/reviews/*.jsonl], classes: [bad, good]}            {"text": text, "label": class}

Loaded by the engine by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal_workers.contract.text_data import LabelledTextConfig, TextClassModelConfig
from shoal_workers.data.labelled import Labelled, prepare_rows
from shoal_workers.data.records import Record
from shoal_workers.data.tokenizer import Tokenizer, load_tokenizer
from shoal_workers.tasks.class_heads import Classifier
from shoal_workers.tasks.pretrained import refuse_small_vocabulary
from shoal_workers.tasks.rows import RowSamples, padded, read_class, read_tokens


class TextClassification(Classifier):
    """Classes of texts."""

    auto_class = "AutoModelForSequenceClassification"

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.settings = TextClassModelConfig.model_validate(model)
        self.texts = LabelledTextConfig.model_validate(data)
        super().__init__(self.settings, self.texts.classes)
        self.tokenizer = self.texts.tokenizer or self.own_tokenizer()

    @property
    def tokens_per_sample(self) -> int:
        return self.settings.seq_len

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Tokenise the texts, unless that was done before."""
        tokenizer, (classes, num_labels) = load_tokenizer(self.tokenizer), self.classes()
        self._examples = prepare_rows(
            self.texts,
            (self.texts.text_field, self.texts.label_field),
            "texts",
            [tokenizer.fingerprint, self.settings.seq_len, classes, num_labels],
            lambda record: self._encoded(record, tokenizer, classes, num_labels),
            progress,
        )

    def _encoded(self, record: Record, tokenizer: Tokenizer, classes: tuple[str, ...], num_labels: int) -> Labelled:
        tokens = read_tokens(record.values[0], record.place, "text_field", tokenizer, self.settings.seq_len)
        label = read_class(record.values[1], record.place, classes, num_labels)
        return Labelled(np.asarray(tokens, "<i4").tobytes(), (label,))

    def build_dataset(self, split: str) -> RowSamples:
        """Samples: `tokens` and `is_token` (seq_len,), `label` (); "train" or "validation".

        Raises:
            DataError: the files cannot be read, or have no sample for training.
        """
        return RowSamples(self.examples(), split, self._sample)

    def _sample(self, payload: bytes, labels: NDArray[Any]) -> dict[str, Tensor]:
        tokens = np.frombuffer(payload, "<i4")
        return {
            "tokens": padded(tokens, self.settings.seq_len, self.padding),
            "is_token": padded(np.ones(len(tokens)), self.settings.seq_len, 0),
            "label": torch.tensor(int(labels[0])),
        }

    def build_model(self) -> nn.Module:
        """See Classifier. ValueError: the model has fewer tokens than the tokenizer, or is a decoder, which reads the
        class at the last token, without a token for padding."""
        model = super().build_model()
        network: Any = model.network
        config = network.config
        if hasattr(network, "score") and config.get_text_config().pad_token_id is None:
            raise ValueError(
                f"the model's config has no pad_token_id, and {type(network).__name__} reads the class at the "
                "last token before the padding. Set pad_token_id in model.config, or in config.json of model.path, to "
                "a token that is in no text."
            )
        refuse_small_vocabulary(config.vocab_size, self.tokenizer)
        return model

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross entropy (nats) of the labels, and the metric `accuracy`."""
        return self.judged(model(input_ids=batch["tokens"], attention_mask=batch["is_token"]), batch["label"])
