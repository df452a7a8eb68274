"""The samples of a whole micro-batch at once: what `sample_at` says of each position, with the arrays of numpy.

One position takes some microseconds in plain Python, which adds up to milliseconds a step where micro-batches have
hundreds of samples. `contract/batch_partition.py` has the rule and explains it. Called by the loop's orders and by
`Batches`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal_workers.contract.batch_partition import epoch_key, sample_at
from shoal_workers.data.permutation import permuted

_MIN_POSITIONS = 32
"""Below it the arrays cost more than they save."""
_VALIDATION = 0x44524157
"""Seed of the draw, so that jobs with other seeds validate the same samples."""


def training_order(data: Any, positions: range, *, seed: int) -> list[int]:
    """The samples of a data set at these global positions: in the order of the data set, if it has one of its own
    (`samples_at(positions, seed)`, a pure function), else each epoch in another permutation."""
    own = getattr(data, "samples_at", None)
    if callable(own):
        return list(own(positions, seed))
    return samples_at(positions, num_samples=len(data), seed=seed)


def validation_order(data: Any, most: int, *, seed: int) -> list[int]:
    """The samples that a validation reads: all, or as many as `most` that are drawn from the whole split. The same in
    every validation, and the same for every job unless the data set has an order of its own, whose shards are then read
    as in training."""
    num_samples = len(data)
    num = min(most, num_samples)
    if num == num_samples:
        return list(range(num))
    own = getattr(data, "samples_at", None)
    drawn = list(own(range(num), seed)) if callable(own) else []
    if (
        len({index for index in drawn if 0 <= index < num_samples}) == num
    ):  # an order that repeats samples would count some several times
        return drawn
    return samples_at(range(num), num_samples=num_samples, seed=_VALIDATION)


def samples_at(positions: range, *, num_samples: int, seed: int) -> list[int]:
    """The samples of the data set at these global positions."""
    if len(positions) < _MIN_POSITIONS:
        return [sample_at(at, num_samples=num_samples, seed=seed) for at in positions]
    indices: list[int] = []
    first = positions.start
    while first < positions.stop:
        epoch, index = divmod(first, num_samples)
        num = min(positions.stop - first, num_samples - index)
        indices += permuted(
            np.arange(index, index + num, dtype=np.uint64), num_samples, epoch_key(seed, epoch)
        ).tolist()
        first += num
    return indices
