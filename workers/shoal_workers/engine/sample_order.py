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


def training_order(data: Any, positions: range, *, seed: int) -> list[int]:
    """The samples of a data set at these global positions: in the order of the data set, if it has one of its own
    (`samples_at(positions, seed)`, a pure function), else each epoch in another permutation."""
    own = getattr(data, "samples_at", None)
    if callable(own):
        return list(own(positions, seed))
    return samples_at(positions, num_samples=len(data), seed=seed)


def samples_at(positions: range, *, num_samples: int, seed: int) -> list[int]:
    """The samples of the data set at these global positions."""
    if len(positions) < _MIN_POSITIONS:
        return [sample_at(at, num_samples=num_samples, seed=seed) for at in positions]
    found: list[int] = []
    first = positions.start
    while first < positions.stop:
        epoch, index = divmod(first, num_samples)
        num = min(positions.stop - first, num_samples - index)
        found += permuted(np.arange(index, index + num, dtype=np.uint64), num_samples, epoch_key(seed, epoch)).tolist()
        first += num
    return found
