"""Which validation samples a rank runs: a pure function of the numbers."""

from __future__ import annotations


def validation_slices(num_samples: int, micro_size: int, rank: int, world_size: int) -> list[tuple[range, int]]:
    """This rank's micro-batches, each with its weight: its number of samples, or 0 for padding.

    Every rank gets as many; over all ranks every sample appears exactly once in a micro-batch with weight.
    """
    whole = [range(first, min(first + micro_size, num_samples)) for first in range(0, num_samples, micro_size)]
    rounds = -(-len(whole) // world_size)
    own = [(samples, len(samples)) for samples in whole[rank::world_size]]
    return own + [(whole[0], 0)] * (rounds - len(own))
