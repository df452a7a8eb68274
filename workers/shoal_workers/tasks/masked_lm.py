"""The task that trains a masked language model of transformers (BERT, RoBERTa, ModernBERT) on text.

    task: shoal_workers.tasks.masked_lm:MaskedLanguageModel
    model: {path: /models/tiny-bert, seq_len: 512}
    data: {paths: [/texts]}                               as of the built-in language model, and `mask_fraction`

A sample is a piece of the text between the tokens that begin and end a text of the tokenizer. Which of its tokens are
hidden is a function of the seed and of the sample's position in the run (masking.py), so it is the same in every layout
and after every failure, and another one in each epoch. Loaded by the engine by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal_workers.contract.encoders import MaskedModelConfig, MaskedTextConfig
from shoal_workers.contract.text_data import BYTE_TOKENIZER, BYTE_VOCABULARY
from shoal_workers.data.errors import TokenizerError
from shoal_workers.data.tokenizer import Tokenizer, load_tokenizer
from shoal_workers.tasks.masking import MaskedSamples, Masking
from shoal_workers.tasks.pretrained import Network, PretrainedModel, refuse_small_vocabulary
from shoal_workers.tasks.rows import summed_cross_entropy
from shoal_workers.tasks.text import TextTask

_MASKS = ("[MASK]", "<mask>", "<|mask|>")


class MaskedLanguageModel(PretrainedModel):
    """Hidden tokens of a text."""

    auto_class = "AutoModelForMaskedLM"

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.settings = MaskedModelConfig.model_validate(model)
        super().__init__(self.settings)
        self.masked = MaskedTextConfig.model_validate({"tokenizer": self.own_tokenizer(), **data})
        self._seed = seed
        self._opened: TextTask | None = None

    @property
    def tokens_per_sample(self) -> int:
        return self.settings.seq_len

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Tokenise the text, unless that was done before. TokenizerError: the vocabulary has no mask token."""
        tokenizer = load_tokenizer(self.masked.tokenizer)
        _masking(self.masked, tokenizer, self._seed)
        self._text(tokenizer).prepare(progress)

    def build_dataset(self, split: str) -> MaskedSamples:
        """Samples of masking.py; "train" or "validation".

        Raises:
            DataError: the text cannot be read, has no sample for training, or its tokenizer has no mask token.
        """
        tokenizer = load_tokenizer(self.masked.tokenizer)
        masking = _masking(self.masked, tokenizer, self._seed)
        samples = self._text(tokenizer).build_dataset(split)
        return MaskedSamples(samples, masking, *_ends(tokenizer), is_training=split == "train")

    def _text(self, tokenizer: Tokenizer) -> TextTask:
        if self._opened is None:
            num_ends = sum(map(len, _ends(tokenizer)))
            self._opened = TextTask(self.masked, max(1, self.settings.seq_len - num_ends))
        return self._opened

    def build_model(self) -> nn.Module:
        """See PretrainedModel. ValueError: the model has fewer tokens than the tokenizer with the mask token."""
        network = self.build_network()
        is_bytes = self.masked.tokenizer == BYTE_TOKENIZER
        refuse_small_vocabulary(network.config.vocab_size, self.masked.tokenizer, more=int(is_bytes))
        return Network(network)

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        """See PretrainedModel."""
        return self.described(model.network, self.tokenizer_files(self.masked.tokenizer))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The sum of the cross entropies (nats) of a micro-batch's hidden tokens, computed in fp32, and their number: a
        step's loss is the mean over all hidden tokens in it."""
        logits = model(input_ids=batch["tokens"])
        return summed_cross_entropy(logits, batch["labels"])


def _ends(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes have no token that begins a text, and pieces of a text do not end with the end of a document."""
    return ((), ()) if tokenizer.token_of(_MASKS) is None else tokenizer.ends


def _masking(config: MaskedTextConfig, tokenizer: Tokenizer, seed: int) -> Masking:
    if config.tokenizer == BYTE_TOKENIZER:
        mask: int | None = BYTE_VOCABULARY
    else:
        mask = tokenizer.token_of(_MASKS if config.mask_token is None else (config.mask_token,))
    if mask is None:
        raise TokenizerError(
            f"data.tokenizer {config.tokenizer!r} has no token {config.mask_token or ' or '.join(_MASKS[:2])}, which a "
            f"masked language model needs ({Path(config.tokenizer).name} of a causal model has none). Name its mask "
            "token in data.mask_token, or the tokenizer of a masked language model in data.tokenizer."
        )
    return Masking(
        fraction=config.mask_fraction,
        mask=mask,
        vocab_size=tokenizer.vocab_size,
        kept=tokenizer.special_tokens | {mask},
        seed=seed,
    )
