"""Several sources of text as one data set, in fixed shares and in an order of its own.

    position of the run  ->  source, and how many of its samples came before  ->  sample of the source
                             `MixtureOrder`                                       a permutation for each epoch of it

Both are pure functions of the position, the shares and the seed, so there is no state, and every world size, restart
and layout reads the same samples. Any run of as many samples as the shares add up to has each source exactly as often
as its share says, and a shorter one almost so: positions are divided evenly, as in a Bresenham line, between two groups
of sources, and those of a group again, down to single sources. Each source has epochs of its own.

The shares may change at positions. A segment has the order of its own shares from its first position on, and each
source goes on with the sample at which the segment before left it. Called by the tasks that read text.

Samples of one source are read from memory-mapped shards. There is no position: sample i is always the same.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import gcd, lcm
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shoal_workers.contract.batch_partition import epoch_key, sample_at
from shoal_workers.contract.mixture_weights import InForce
from shoal_workers.contract.text_data import TextSource
from shoal_workers.data.concatenation import locate
from shoal_workers.data.corpus import Corpus
from shoal_workers.data.errors import CorpusTooSmallError
from shoal_workers.data.tokenizer import Split

_ORDERS = 0x4D495854
"""Sets the orders of the sources apart from that of a data set with the same seed."""


class Interleaving:
    """Which source each position belongs to. `shares`: whole numbers, not all 0; a source with share 0 never comes."""

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = tuple(shares)
        self.period = sum(self.shares)
        self._root = _divided(self.shares)

    def at(self, position: int) -> tuple[int, int]:
        """Return the source of a position, and how many earlier positions belong to it."""
        node = self._root
        while isinstance(node, _Fork):
            before = _num_before(position, node)
            if _num_before(position + 1, node) > before:
                node, position = node.larger, before
            else:
                node, position = node.smaller, position - before
        return node, position

    def counts(self, positions: int) -> list[int]:
        """How many of the first `positions` belong to each source."""
        totals = [0] * len(self.shares)
        pending: list[tuple[_Fork | int, int]] = [(self._root, positions)]
        while pending:
            node, num = pending.pop()
            if isinstance(node, _Fork):
                before = _num_before(num, node)
                pending += [(node.larger, before), (node.smaller, num - before)]
            else:
                totals[node] = num
        return totals


@dataclass(frozen=True, slots=True)
class _Fork:
    """Positions are divided between two groups of sources."""

    larger: _Fork | int
    """A source, or a group that is divided further."""
    smaller: _Fork | int
    larger_share: int
    share: int


def _divided(shares: Sequence[int]) -> _Fork | int:
    """A tree in which a source with a large share is near the root (Huffman 1952), so a position costs few divisions
    also among many sources. Of equal shares the first sources are joined first."""
    heap: list[tuple[int, int, _Fork | int]] = [(share, number, number) for number, share in enumerate(shares) if share]
    heapq.heapify(heap)
    for number in itertools.count(len(shares)):
        share, _, smaller = heapq.heappop(heap)
        if not heap:
            return smaller
        larger_share, _, larger = heapq.heappop(heap)
        joined = _Fork(larger, smaller, larger_share, share + larger_share)
        heapq.heappush(heap, (joined.share, number, joined))
    raise AssertionError("the loop ends with one group")


def _num_before(position: int, fork: _Fork) -> int:
    """How many of the first `position` positions belong to the larger group."""
    return (position * fork.larger_share + fork.share // 2) // fork.share


@dataclass(frozen=True, slots=True)
class _Segment:
    first: int
    """Its first position."""
    order: Interleaving
    before: tuple[int, ...]
    """How many samples of each source earlier segments have read."""


class MixtureOrder:
    """Which source each position belongs to, with shares that may change.

    Args:
        shares: as for `Interleaving`.
        changes: a first position and the shares from there on, in the order of the positions.
    """

    def __init__(self, shares: Sequence[int], changes: Sequence[tuple[int, Sequence[int]]] = ()) -> None:
        self.shares = tuple(shares)
        self._segments = [_Segment(0, Interleaving(shares), (0,) * len(self.shares))]
        for first, changed in changes:
            self._segments.append(_Segment(first, Interleaving(changed), tuple(self.counts(first))))
        self._firsts = [segment.first for segment in self._segments]

    def at(self, position: int) -> tuple[int, int]:
        """As `Interleaving.at`."""
        segment = self._segments[bisect_right(self._firsts, position) - 1]
        source, number = segment.order.at(position - segment.first)
        return source, segment.before[source] + number

    def counts(self, positions: int) -> list[int]:
        """As `Interleaving.counts`."""
        segment = next(part for part in reversed(self._segments) if part.first <= positions)
        return [
            before + num
            for before, num in zip(segment.before, segment.order.counts(positions - segment.first), strict=True)
        ]


def find_shares(sources: Sequence[TextSource], sizes: Sequence[int]) -> list[int]:
    """Return the shares in which sources are mixed, exact: weights as they are written, or sizes (in samples) times
    epochs.

    The spec gives all sources a weight, or all of them epochs.
    """
    return _whole(
        [
            _exact(source.weight) if source.weight is not None else _exact(source.epochs or 0.0) * size
            for source, size in zip(sources, sizes, strict=True)
        ]
    )


def _exact(value: float) -> Fraction:
    """As it is written."""
    return Fraction(repr(value))


def _whole(wanted: Sequence[Fraction]) -> list[int]:
    """Return the same shares as whole numbers, without a common divisor."""
    common = lcm(*(fraction.denominator for fraction in wanted))
    whole = [int(fraction * common) for fraction in wanted]
    divisor = gcd(*whole)
    return [count // divisor for count in whole]


class Mixture(Dataset[Tensor]):
    """The training samples of several sources: numbered source after source, and read in the order of `samples_at`."""

    def __init__(self, parts: Sequence[TokenDataset], sources: Sequence[TextSource]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))
        self.order = MixtureOrder(find_shares(sources, [len(part) for part in parts]))
        described = [[part.content_hash for part in parts], self.order.shares]
        # changes of the weights do not count: a checkpoint has those that took effect before it
        self.content_hash = hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest()

    def change_weights(self, changes: Sequence[InForce], global_size: int) -> None:
        """Replace the earlier changes of weights by these. `global_size`: samples of a step."""
        initial = self.order.shares
        self.order = MixtureOrder(
            initial,
            [
                (
                    (at_step - 1) * global_size,
                    initial if weights is None else _whole(list(map(_exact, weights))),
                )
                for at_step, weights in changes
            ],
        )

    def content_parts(self) -> dict[str, str]:
        """Return the hash of each shard of each source, by its path and the files that it was made from."""
        return {name: content for part in self._parts for name, content in part.content_parts().items()}

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Tensor:
        source, number = locate(self._ends, index)
        return self._parts[source][number]

    def samples_at(self, positions: range, seed: int) -> list[int]:
        """Return the samples at these positions of the run, which the engine asks for instead of its own order."""
        return [self._sample_at(position, seed) for position in positions]

    def _sample_at(self, position: int, seed: int) -> int:
        source, number = self.order.at(position)
        first = self._ends[source - 1] if source else 0
        return first + sample_at(number, num_samples=len(self._parts[source]), seed=epoch_key(seed ^ _ORDERS, source))


class ValidationMixture(Dataset[Tensor]):
    """The validation samples of several sources, in the same shares, each sample once, in an order that is drawn for
    each source: as many as the source that is exhausted first allows. A source without validation samples is left
    out."""

    def __init__(self, parts: Sequence[TokenDataset], shares: Sequence[int]) -> None:
        self._parts = parts
        shares = [share if len(part) else 0 for part, share in zip(parts, shares, strict=True)]
        self._order = Interleaving(shares)
        self._num_samples = self._most() if any(shares) else 0

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        source, number = self._order.at(index)
        part = self._parts[source]
        return part[sample_at(number, num_samples=len(part), seed=epoch_key(_ORDERS, source))]

    def samples_at(self, positions: range, seed: int) -> list[int]:
        """Return the positions themselves: the samples at the first ones have the shares of the sources."""
        return list(positions)

    def _most(self) -> int:
        sizes = [len(part) for part in self._parts]

        def exhausts(num: int) -> bool:
            return any(count > size for count, size in zip(self._order.counts(num), sizes, strict=True))

        return bisect_left(range(1, sum(sizes) + 1), True, key=exhausts)  # counts only grow


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
