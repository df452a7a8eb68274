"""The power of two that turns a step's gradients into integers: a pure function of the largest gradient element.

    rung    scale     for |gradient| of one micro-batch below    smallest difference kept
    0       2**50     2**12 = 4096                               2**-50 = 8.9e-16
    1       2**26     2**36                                      2**-26
    ...     ...       ...                                        2**-38 of the limit below it
    5       2**-70    2**132: all of fp32                        2**70

Rung 0 holds every fp32 gradient between 2**-26 and 4096 exactly, and smaller ones to 8.9e-16, far below Adam's default
eps of 1e-8. The mean over the n micro-batches is a sum of terms below limit / n, so no int64 sum can overflow:
n * (2**12 * 2**50 / n) = 2**62.

The rung must not depend on the world size, so it follows from the largest element over all micro-batches, which is
known only after the pass. A pass that ran on another rung is repeated. That is rare, because a pass begins with the
rung of the pass before. Called by `ExactGradients`.
"""

from __future__ import annotations

NUM_RUNGS = 6
_TOP_BITS = 50
_LIMIT_BITS = 12
_STEP_BITS = 24


def scale_of(rung: int) -> float:
    """The factor of gradients on this rung; the multiplication is exact."""
    return float(2.0 ** (_TOP_BITS - _STEP_BITS * rung))


def rung_of(largest: float) -> int | None:
    """The rung for a step whose largest gradient element of any micro-batch, unweighted, is `largest`.

    None: it is not finite, or above the range of fp32.
    """
    for rung in range(NUM_RUNGS):
        if largest < 2.0 ** (_LIMIT_BITS + _STEP_BITS * rung):  # false for nan
            return rung
    return None
