"""The task that trains a masked language model of transformers (BERT, RoBERTa, ModernBERT) on text.

    task: shoal_workers.tasks.masked_lm:MaskedLanguageModel
    model: {path: /models/tiny-bert, seq_len: 512}
    data: {paths: [/texts]}                               as of the built-in language model, and `mask_fraction`

A sample is a piece of the text between the tokens that begin and end a text of the tokenizer (Devlin et al. 2018). Of
the tokens that are no special ones, `fraction` are to be predicted, at least one: 80 % of these are replaced by the
mask token, 10 % by a random one, and 10 % stay. A pure function of the seed and of a number, from the stream of NumPy's
Philox, which NumPy guarantees, and integers, so it is the same on every machine. The number is the position in the run
and the sample together, so each epoch hides other tokens; samples of the validation have the same mask each time.
Loaded by the engine by its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoal_workers.contract.batch_partition import sample_at
from shoal_workers.contract.text_data import BYTE_TOKENIZER, BYTE_VOCABULARY, MaskedModelConfig, MaskedTextConfig
from shoal_workers.data.errors import TokenizerError
from shoal_workers.data.tokenizer import Tokenizer, load_tokenizer
from shoal_workers.tasks.pretrained import Network, PretrainedModel, refuse_small_vocabulary
from shoal_workers.tasks.rows import NO_LABEL, summed_cross_entropy
from shoal_workers.tasks.text import TextTask

_TENTHS = 10
_MASKED, _RANDOM = 8, 9
"""A chosen token has a number below ten. Below the first of these it becomes the mask, below the second a random
token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    fraction: float
    mask: int
    """The mask token."""
    vocab_size: int
    """Random tokens are below it."""
    kept: frozenset[int]
    """Tokens that are never hidden, and never put in another's place."""
    seed: int

    def apply(self, tokens: NDArray[Any], number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Tokens (T,) int64 -> tokens with some hidden, and labels: the token where one is to be predicted, else
        NO_LABEL. `number`: at least 0; another one hides other tokens."""
        kept = np.fromiter(self.kept, np.int64, len(self.kept))
        candidates = np.flatnonzero(~np.isin(tokens, kept))
        hidden, labels = tokens.copy(), np.full_like(tokens, NO_LABEL)
        if not len(candidates):
            return hidden, labels
        draws = self._draw(number, 3 * len(candidates)).reshape(3, -1)
        num = max(1, round(self.fraction * len(candidates)))
        chosen = np.argsort(draws[0], kind="stable")[:num]
        places = candidates[chosen]
        tenth = draws[1][chosen] % np.uint64(_TENTHS)
        replaced = (draws[2][chosen] % np.uint64(self.vocab_size)).astype(np.int64)
        is_random = (tenth >= _MASKED) & (tenth < _RANDOM) & ~np.isin(replaced, kept)
        labels[places] = tokens[places]
        hidden[places[tenth < _MASKED]] = self.mask
        hidden[places[is_random]] = replaced[is_random]
        return hidden, labels

    def _draw(self, number: int, count: int) -> NDArray[Any]:
        key = np.array([self.seed & 0xFFFFFFFFFFFFFFFF, number & 0xFFFFFFFFFFFFFFFF], np.uint64)
        draws: NDArray[Any] = np.random.Philox(key=key, counter=number >> 64).random_raw(count)
        return draws

    def describe(self) -> str:
        """All that decides what is hidden."""
        return f"{self.fraction} {self.mask} {self.vocab_size} {sorted(self.kept)} {self.seed}"


class MaskedSamples(Dataset[dict[str, Tensor]]):
    """Samples of a text, (seq_len + 1,) int64 each, of which the last token is left out -> `tokens` and `labels` (T,),
    with the tokens `begin` and `end` around."""

    def __init__(
        self, samples: Any, masking: Masking, begin: tuple[int, ...], end: tuple[int, ...], *, is_training: bool
    ) -> None:
        self._samples = samples
        self._masking = masking
        self._begin, self._end = (np.array(ends, np.int64) for ends in (begin, end))
        self._is_training = is_training
        self._size = len(samples)
        digest = hashlib.sha256(f"{masking.describe()} {begin} {end} ".encode())
        digest.update(getattr(samples, "content_hash", "").encode())
        self.content_hash = digest.hexdigest()
        if hasattr(samples, "content_parts"):
            self.content_parts = samples.content_parts

    def __len__(self) -> int:
        return self._size

    def samples_at(self, positions: range, seed: int) -> list[int]:
        """Return the samples at these positions of the run: each number holds the position, too, which decides the
        mask."""
        own = getattr(self._samples, "samples_at", None)
        if own is not None:
            samples = own(positions, seed)
        else:
            samples = [sample_at(position, num_samples=self._size, seed=seed) for position in positions]
        return [position * self._size + sample for position, sample in zip(positions, samples, strict=True)]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._samples[index % self._size][:-1].numpy()
        # 1 and 0 keep the masks of both splits apart
        hidden, labels = self._masking.apply(tokens, 2 * index + int(self._is_training))
        none = [np.full(len(ends), NO_LABEL, np.int64) for ends in (self._begin, self._end)]
        return {
            "tokens": torch.from_numpy(np.concatenate([self._begin, hidden, self._end])),
            "labels": torch.from_numpy(np.concatenate([none[0], labels, none[1]])),
        }


_MASKS = ("[MASK]", "<mask>", "<|mask|>")


class MaskedLanguageModel(PretrainedModel):
    """Hidden tokens of a text."""

    auto_class = "AutoModelForMaskedLM"

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.settings = MaskedModelConfig.model_validate(model)
        super().__init__(self.settings)
        self.masked = MaskedTextConfig.model_validate({"tokenizer": self.own_tokenizer(), **data})
        self.tokenizer = self.masked.tokenizer
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

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the cross entropies (nats) of a micro-batch's hidden tokens, computed in fp32, and their
        number: a step's loss is the mean over all hidden tokens in it."""
        logits = model(input_ids=batch["tokens"])
        return summed_cross_entropy(logits, batch["labels"])


def _ends(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes have no token that begins a text, and pieces of a text do not end with the end of a document."""
    return ((), ()) if tokenizer.find_token(_MASKS) is None else tokenizer.ends


def _masking(config: MaskedTextConfig, tokenizer: Tokenizer, seed: int) -> Masking:
    if config.tokenizer == BYTE_TOKENIZER:
        mask: int | None = BYTE_VOCABULARY
    else:
        mask = tokenizer.find_token(_MASKS if config.mask_token is None else (config.mask_token,))
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
