"""The samples of a whole micro-batch at once: what `sample_at` says of each position, with the arrays of numpy.

One position takes some microseconds in plain Python, which adds up to milliseconds a step where micro-batches have
hundreds of samples. `contract/batch_partition.py` has the rule and explains it. Called by the loop's orders and by
`Batches`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal_workers.contract.batch_partition import ROUND_STEP, ROUNDS, epoch_key, half_bits_of, sample_at

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
        found += _permuted(np.arange(index, index + num, dtype=np.uint64), num_samples, epoch_key(seed, epoch)).tolist()
        first += num
    return found


def _permuted(values: Any, size: int, key: int) -> Any:
    half_bits = half_bits_of(size)
    values = _feistel(values, half_bits, key)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, key)
    return values


def _feistel(values: Any, half_bits: int, key: int) -> Any:
    mask, bits = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> bits, values & mask
    for number in range(ROUNDS):
        round_key = np.uint64((key + number * ROUND_STEP) & 0xFFFFFFFFFFFFFFFF)
        left, right = right, left ^ (_mix(round_key ^ right) & mask)
    return left << bits | right


def _mix(values: Any) -> Any:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
