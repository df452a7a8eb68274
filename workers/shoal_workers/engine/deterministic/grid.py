"""The power of two whose multiples a step's gradients become: a pure function of the largest gradient element.

    rung    for |gradient| of one micro-batch below    grid: the smallest difference kept
    0       2**6 = 64                                  2**-45 = 2.8e-14
    1       2**18                                      2**-33
    ...     ...                                        2**-51 of the limit
    11      2**138: all of fp32                        2**87

Multiples of the grid are added in float64 without any rounding as long as no sum exceeds 2**53 of them. The mean over
the n micro-batches is a sum of terms below limit / n, so no sum exceeds the limit, 2**51 of them, by more than what
rounding each term has added. Rung 0 holds every fp32 gradient between 2**-21 and 64 exactly, and smaller ones to
1.4e-14, far below Adam's default eps of 1e-8.

The rung must not depend on the world size, so it follows from the largest element over all micro-batches, which is
known only after the pass. A pass that ran on another rung is repeated. That is rare, because a pass begins with the
rung of the pass before. Called by `ExactGradients`.
"""

from __future__ import annotations

from torch import Tensor

NUM_RUNGS = 12
_LIMIT_BITS = 6
_STEP_BITS = 12
_BITS = 51
"""A value just below the limit is this many powers of two above the grid."""


def grid_of(rung: int) -> float:
    """What all gradients on this rung become multiples of."""
    return float(2.0 ** (_LIMIT_BITS + _STEP_BITS * rung - _BITS))


def round_to_grid(values: Tensor, rung: int) -> Tensor:
    """In place. Float64, each below the rung's limit; to the nearest multiple, halfway to the even one.

    Next to 1.5 x 2**52 of them, float64 has no numbers between the multiples."""
    constant = 1.5 * 2.0**52 * grid_of(rung)
    return values.add_(constant).sub_(constant)


def rung_of(largest: float) -> int | None:
    """The rung for a step whose largest gradient element of any micro-batch, unweighted, is `largest`.

    None: it is not finite, or above the range of fp32.
    """
    for rung in range(NUM_RUNGS):
        if largest < 2.0 ** (_LIMIT_BITS + _STEP_BITS * rung):  # false for nan
            return rung
    return None
