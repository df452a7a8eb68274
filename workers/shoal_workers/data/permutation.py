"""The permutation of contract/batch_partition.py over whole arrays, with numpy: equal to `permute` of each value.

One value takes some microseconds in plain Python, and a step may have thousands. Called by the engine's order of
samples and by the order of streamed shards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal_workers.contract.batch_partition import ROUND_STEP, ROUNDS, count_half_bits


def permuted(values: Any, size: int, key: int) -> Any:
    """`values`: uint64, each below `size`; the result too."""
    half_bits = count_half_bits(size)
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
