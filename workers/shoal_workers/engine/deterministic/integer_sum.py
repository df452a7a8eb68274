"""Sums of doubles that have the same bits in any order and any grouping: a long accumulator in int64 digits.

    value = digit[0] * 2**256 + digit[1] * 2**224 + ... + digit[13] * 2**-160      each |digit| < 2**32

Splitting a double into digits is exact, digits are added as integers, and integer addition is associative. So ranks may
add any values in any order, and one correctly rounded conversion at the end gives the same double everywhere (the idea
of Kulisch's accumulator). Only the part of each value below 2**-160 is dropped. Called by `ExactGradients` and
`Validation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from shoal_workers.engine.group.all_ranks import all_ranks

_DIGIT_BITS = 32
_POWERS = tuple(range(256, -161, -_DIGIT_BITS))
NUM_DIGITS = len(_POWERS)
_LIMIT = 2.0 ** (_POWERS[0] + _DIGIT_BITS)


@torch.no_grad()
def digits_of(values: Tensor) -> Tensor:
    """The exact sum of `values`, as int64 digits of shape (NUM_DIGITS,).

    Args:
        values: finite float64 of shape (n,), each below 2**288 in magnitude; n < 2**30.
    """
    sign, rest = values.sign(), values.abs()
    digits = []
    for power in _POWERS:
        # Exact: a power of two changes no digits, and the difference drops only those that are taken.
        digit = (rest * 2.0**-power).floor_()
        rest = rest - digit * 2.0**power
        digits.append((digit * sign).to(torch.int64).sum())
    return torch.stack(digits)


def value_of(digits: Sequence[int]) -> float:
    """The double that is nearest to the sum that the digits represent."""
    lowest = _POWERS[-1]
    scaled = sum(digit << (power - lowest) for digit, power in zip(digits, _POWERS, strict=True))
    return float(Fraction(scaled, 1 << -lowest))


@torch.no_grad()
def split_finite(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values` with zeros in the place of values that digits cannot hold, and the number of those as an int64
    scalar."""
    is_good = values.abs() < _LIMIT  # false for nan
    return values.where(is_good, 0.0), (~is_good).sum()


def sums_over_ranks(rows: Sequence[Tensor]) -> list[float]:
    """The exact sum of all ranks' values in each row, nan if any is not finite: one collective. All ranks have the same
    number of rows, each of any length and any floating-point type."""
    boxes = []
    for values in rows:
        good, num_bad = split_finite(values.double())
        boxes.append(torch.cat([num_bad.reshape(1), digits_of(good)]))
    box = torch.stack(boxes)
    all_ranks().all_reduce(box)
    return [math.nan if num_bad else value_of(digits) for num_bad, *digits in box.tolist()]


@torch.no_grad()
def row_squares(tensor: Tensor) -> Tensor:
    """Sum of squares of each slice along dim 0, float64 of shape (tensor.shape[0],).

    A row's result does not depend on the number of other rows: the columns are added pairwise, element by element.
    torch's own reductions do not guarantee that, because their order depends on shape and number of threads.
    """
    rows = tensor.shape[0]
    if tensor.numel() == 0:
        return torch.zeros(rows, dtype=torch.float64, device=tensor.device)
    squares = tensor.reshape(rows, -1).to(torch.float64)
    squares = squares * squares
    while (width := squares.shape[1]) > 1:
        half = width // 2
        folded = squares[:, :half] + squares[:, half : 2 * half]
        if width % 2:
            folded[:, 0] += squares[:, -1]
        squares = folded
    return squares[:, 0]
