"""Which tokens of a sample are hidden, and what stands in their place (Devlin et al. 2018).

Of the tokens that are no special ones, `fraction` are to be predicted, at least one: 80 % of these are replaced by the
mask token, 10 % by a random one, and 10 % stay. A pure function of the seed and of a number, from the stream of NumPy's
Philox, which NumPy guarantees, and integers, so it is the same on every machine. The number is the position in the run
and the sample together, so each epoch hides other tokens; samples of the validation have the same mask each time.
Called by the task of masked language models.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shoal_workers.contract.batch_partition import sample_at

NO_LABEL = -100
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
        words = self._words(number, 3 * len(candidates)).reshape(3, -1)
        num = max(1, round(self.fraction * len(candidates)))
        chosen = np.argsort(words[0], kind="stable")[:num]
        places = candidates[chosen]
        tenth = words[1][chosen] % np.uint64(_TENTHS)
        replaced = (words[2][chosen] % np.uint64(self.vocab_size)).astype(np.int64)
        is_random = (tenth >= _MASKED) & (tenth < _RANDOM) & ~np.isin(replaced, kept)
        labels[places] = tokens[places]
        hidden[places[tenth < _MASKED]] = self.mask
        hidden[places[is_random]] = replaced[is_random]
        return hidden, labels

    def _words(self, number: int, count: int) -> NDArray[Any]:
        key = np.array([self.seed & 0xFFFFFFFFFFFFFFFF, number & 0xFFFFFFFFFFFFFFFF], np.uint64)
        words: NDArray[Any] = np.random.Philox(key=key, counter=number >> 64).random_raw(count)
        return words

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
        """The samples at these positions of the run: each number holds the position, too, which decides the mask."""
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
