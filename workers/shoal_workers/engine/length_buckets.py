"""Micro-batches of samples of similar length with a fixed budget of tokens, for a dataset that has `lengths` and
`tokens_per_micro_batch`, the budget.

    lengths    5 97 12 ...                  tokens of each sample
    class      samples whose lengths differ by less than 1/16, the longest class first
    slots      | 97 94 95 | 61 63 | 12 ...  one for each sample, in the order of the classes
    bucket     slots s .. e, as many as fit: number of samples x upper end of the longest one's class <= the budget

A micro-batch is one bucket, so it needs little padding, and no more memory than its budget. Which slots a bucket has
depends on the lengths alone, and so does the number of buckets. Which sample of a class stands in a slot is another
permutation in each epoch, and so is the order of the buckets. All of it is a pure function of seed, position and
lengths: every world size reads the same micro-batches, each sample exactly once in an epoch, and nobody stores a
position. Buckets have different numbers of samples, so a loss must be (sum, weight).

Called by `LoadedTask`, which gives the passes buckets in the place of samples.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_workers.contract.batch_partition import sample_at
from shoal_workers.engine.sample_order import samples_at

_CLASSES_PER_DOUBLING_BITS = 4
"""16 classes between a length and twice that length."""


class Bucket(list[Any]):
    """The samples of one micro-batch."""


class LengthBuckets:
    """A dataset whose samples are the buckets of another one. Its indices are positions of the run.

    Raises:
        TypeError, ValueError: `lengths` or `tokens_per_micro_batch` are not those of the dataset's samples.
    """

    def __init__(self, data: Any, seed: int) -> None:
        self.samples = data
        """The data set."""
        self._seed = seed
        lengths, budget = _checked(data)
        bounds = class_bounds(lengths)
        self._order = np.argsort(-bounds, kind="stable")
        """Samples by class, the longest first; each class is permuted within itself."""
        sorted_bounds = bounds[self._order]
        self._class_starts = np.flatnonzero(np.diff(sorted_bounds, prepend=-1))
        self._class_ends = np.append(self._class_starts[1:], len(lengths))
        self._starts = bucket_starts(sorted_bounds, budget)
        inner = getattr(data, "content_hash", "")
        digest = hashlib.sha256(f"{inner} {budget}".encode())
        digest.update(lengths.data)
        self.content_hash = digest.hexdigest() if isinstance(inner, str) and inner else ""

    def __len__(self) -> int:
        return len(self._starts)

    def samples_at(self, positions: range, seed: int) -> list[int]:
        """The positions themselves: `__getitem__` knows the order."""
        assert seed == self._seed
        return list(positions)

    def __getitem__(self, position: int) -> Bucket:
        return Bucket(self.samples[number] for number in self.members(position))

    def members(self, position: int) -> list[int]:
        """The samples of the data set in the bucket at this position of the run."""
        epoch = position // len(self)
        bucket = sample_at(position, num_samples=len(self), seed=self._seed)
        first = int(self._starts[bucket])
        end = int(self._starts[bucket + 1]) if bucket + 1 < len(self) else len(self._order)
        indices: list[int] = []
        while first < end:
            number = int(np.searchsorted(self._class_starts, first, side="right")) - 1
            begin, limit = int(self._class_starts[number]), int(self._class_ends[number])
            place, num = epoch * (limit - begin) + first - begin, min(end, limit) - first
            # Another seed than that of the buckets' order, or equal sizes would give equal permutations.
            seed = self._seed ^ (number + 1) << 32
            places = samples_at(range(place, place + num), num_samples=limit - begin, seed=seed)
            indices += self._order[begin + np.asarray(places)].tolist()
            first += num
        return indices


def class_bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The upper end of each length's class: at most 1/16 more. Lengths of at most 32 are classes of their own."""
    steps = np.int64(1) << np.maximum(0, np.log2(lengths).astype(np.int64) - _CLASSES_PER_DOUBLING_BITS)
    bounds: NDArray[np.int64] = -(-lengths // steps) * steps
    return bounds


def bucket_starts(bounds: NDArray[np.int64], tokens_per_micro_batch: int) -> NDArray[np.int64]:
    """The first slot of each bucket. `bounds`: of all slots, descending. A sample always has room alone."""
    starts = []
    slot = 0
    while slot < len(bounds):
        starts.append(slot)
        # the end of a class may lie beyond the budget when its longest sample does not
        slot += max(1, tokens_per_micro_batch // int(bounds[slot]))
    return np.asarray(starts, np.int64)


def _checked(data: Any) -> tuple[NDArray[np.int64], int]:
    budget = data.tokens_per_micro_batch
    name = type(data).__name__
    key = f"{name}.tokens_per_micro_batch"
    if not isinstance(budget, int) or budget < 1:
        raise ValueError(f"{key} is {budget!r}. It is a number of tokens, or None.")
    if callable(getattr(data, "samples_at", None)):
        raise TypeError(
            f"{key} is {budget}, and {name} has samples_at: micro-batches of similar lengths have an order of their "
            "own. Remove one of the two."
        )
    given = getattr(data, "lengths", None)
    if given is None:
        raise TypeError(
            f"{key} is {budget}, and {name} has no lengths. Give it the number of tokens of each sample, in the order "
            "of the indices, or set tokens_per_micro_batch to None."
        )
    lengths = np.ascontiguousarray(given, np.int64)
    if lengths.shape != (len(data),) or lengths.min() < 1:
        raise ValueError(
            f"{name}.lengths has the shape {lengths.shape} and the smallest value {lengths.min()}, and the dataset has "
            f"{len(data):,} samples. It needs a length of at least 1 for each of them."
        )
    if lengths.max() > budget:
        raise ValueError(
            f"{key} is {budget}, and the longest sample has {lengths.max()} tokens, so it has no room in a "
            "micro-batch. Set it higher, or cut the sample."
        )
    return lengths, budget
