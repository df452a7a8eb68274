"""Which rank computes which micro-batches of a step, and which samples they contain. Pure functions.

The samples of a step depend on the step and the seed only, and each rank takes a slice of them. The loader's position
is therefore one integer, the step, and every world size reads the same global batches. No rank stores a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

_MASK64 = (1 << 64) - 1
ROUNDS = 4
ROUND_STEP = 0x9E3779B97F4A7C15
"""Two constants of the permutation."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass of one rank."""

    index: int
    """Index of the micro-batch in the step's global batch, 0 .. num_micro_batches - 1."""
    weight: float
    """1.0; 0.0 for padding, which is computed only so that all ranks run the same collectives."""


def micro_batches_of_rank(num_micro_batches: int, rank: int, world_size: int) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of one data rank: a contiguous slice, padded so that all ranks have equally many.

    Over all ranks every index of 0 .. num_micro_batches - 1 appears exactly once with weight 1.
    """
    assert 0 <= rank < world_size
    base, extra = divmod(num_micro_batches, world_size)
    first = rank * base + min(rank, extra)
    num_local = base + (1 if rank < extra else 0)
    longest = base + (1 if extra else 0)
    real = [MicroBatch(index, 1.0) for index in range(first, first + num_local)]
    padding_index = real[-1].index if real else 0
    return tuple(real + [MicroBatch(padding_index, 0.0)] * (longest - num_local))


def sample_positions(step: int, micro_batch: int, *, global_size: int, micro_size: int) -> range:
    """Return the positions in the run that a micro-batch of a step reads; steps count from 0."""
    first = step * global_size + micro_batch * micro_size
    return range(first, first + micro_size)


def sample_at(position: int, *, num_samples: int, seed: int) -> int:
    """Return the sample of the data set at a position of the run; every epoch has a new permutation.

    A pseudo-random permutation by a Feistel network with cycle walking (Black & Rogaway 2002), so there is no table,
    and position -> sample costs the same for 10 samples and for 10 billion.
    """
    epoch, index = divmod(position, num_samples)
    return permute(index, num_samples, epoch_key(seed, epoch))


@lru_cache(maxsize=8)
def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of an epoch's permutation."""
    return _mix(_mix(seed) ^ epoch)


def count_half_bits(size: int) -> int:
    """Return the bits of a half of the numbers that the permutation works on: 4**bits >= size."""
    return max(1, ((size - 1).bit_length() + 1) // 2)


def randomness_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return the seed of dropout and noise in one micro-batch: the same on every rank and in every process."""
    return _mix(_mix(_mix(seed) ^ step) ^ micro_batch) >> 1


def permute(index: int, size: int, key: int) -> int:
    """Return the value at an index of the key's permutation of 0 .. size - 1."""
    half_bits = count_half_bits(size)
    while True:  # the network permutes 4**half_bits >= size values: go on until one is below size
        index = _feistel(index, half_bits, key)
        if index < size:
            return index


def unpermute(value: int, size: int, key: int) -> int:
    """Return the index of a value in the permutation."""
    half_bits = count_half_bits(size)
    while True:
        value = _unfeistel(value, half_bits, key)
        if value < size:
            return value


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(ROUNDS):
        left, right = right, left ^ (_mix(key + round_number * ROUND_STEP ^ right) & mask)
    return left << half_bits | right


def _unfeistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in reversed(range(ROUNDS)):
        left, right = right ^ (_mix(key + round_number * ROUND_STEP ^ left) & mask), left
    return left << half_bits | right


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea & Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
