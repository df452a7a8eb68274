"""Exact sums: what is added together, in which order and in how many heaps, does not show in the result."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_workers.engine.deterministic.integer_sum import digits_of, row_squares, split_finite, value_of

DOUBLES = st.floats(min_value=-1e80, max_value=1e80, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-30)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=30)
@given(st.lists(DOUBLES, max_size=30))
def test_the_sum_is_correctly_rounded(values: list[float]) -> None:
    assert value_of(digits_of(tensor(values)).tolist()) == math.fsum(values)


@settings(max_examples=30)
@given(st.lists(DOUBLES, max_size=30), st.integers(0, 30), st.randoms())
def test_grouping_and_order_do_not_change_the_sum(values: list[float], cut: int, random: object) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    in_heaps = digits_of(tensor(shuffled[:cut])) + digits_of(tensor(shuffled[cut:]))
    assert value_of(in_heaps.tolist()) == value_of(digits_of(tensor(values)).tolist())


def test_values_beyond_the_digits_are_counted_and_left_out() -> None:
    good, num_bad = split_finite(tensor([1.5, math.nan, math.inf, -math.inf, 1e90]))
    assert good.tolist() == [1.5, 0.0, 0.0, 0.0, 0.0]
    assert num_bad == 4


@pytest.mark.parametrize("shape", [(7, 1), (7,), (9, 3), (33, 384), (5, 17, 3), (4, 2, 3, 5), (1, 70_001)])
def test_a_row_has_the_same_bits_with_any_other_rows(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    squares = row_squares(whole)
    assert squares.shape == (shape[0],)
    assert squares.tolist() == pytest.approx(whole.double().reshape(shape[0], -1).square().sum(1).tolist())
    for first in range(shape[0]):
        for last in range(first + 1, shape[0] + 1):
            assert torch.equal(row_squares(whole[first:last]), squares[first:last])


def test_rows_have_the_same_bits_with_any_number_of_threads() -> None:
    whole = torch.randn(40, 5_001, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = row_squares(whole)
        torch.set_num_threads(3)
        assert torch.equal(row_squares(whole), one)
    finally:
        torch.set_num_threads(before)


def test_sums_of_no_rows_and_of_empty_rows_are_zero() -> None:
    assert row_squares(torch.zeros(0, 4)).shape == (0,)
    assert row_squares(torch.zeros(3, 0)).tolist() == [0.0] * 3
    assert value_of(digits_of(torch.zeros(0, dtype=torch.float64)).tolist()) == 0.0
