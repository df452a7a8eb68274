"""Sequences that follow each other and are read as one: shards, row groups, sources."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def locate(ends: Sequence[int], index: int) -> tuple[int, int]:
    """Return the sequence that has an element, and the element's number there.

    Args:
        index: number of the element among those of all sequences.
        ends: for each sequence, the number of elements in it and in those before it.
    """
    sequence = bisect_right(ends, index)
    return sequence, index - (ends[sequence - 1] if sequence else 0)
