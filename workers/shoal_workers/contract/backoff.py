"""The pause before a retry, for every loop that tries again. Pure."""

from __future__ import annotations

import math

_MAX_DOUBLINGS = 60
"""A float can be doubled more often, but not without end."""


def backoff_s(num_failures: int, *, first_s: float, longest_s: float = math.inf, spread: float = 1.0) -> float:
    """Return the pause after failures in a row: `first_s`, doubled with each further one.

    Args:
        num_failures: at least 1.
        spread: 0 to 1. The pause is shortened by up to a half if it is below 1. A random number keeps apart clients
            that have failed together.
    """
    doublings = min(num_failures - 1, _MAX_DOUBLINGS)
    return min(longest_s, first_s * 2.0**doublings) * (0.5 + spread / 2)
