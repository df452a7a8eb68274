"""The scale of a step's gradients: a function of their largest element, and no sum can overflow at it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_workers.engine.deterministic.scale import NUM_RUNGS, rung_of, scale_of


@pytest.mark.parametrize(
    ("largest", "rung"),
    [(0.0, 0), (4095.99, 0), (4096.0, 1), (2.0**36, 2), (3.4e38, 5), (math.inf, None), (math.nan, None)],
)
def test_rungs_begin_at_the_values_of_the_table(largest: float, rung: int | None) -> None:
    assert rung_of(largest) == rung


@settings(max_examples=30)
@given(st.floats(0, 3.4e38), st.integers(1, 100_000))
def test_the_sum_of_all_micro_batches_fits_into_int64(largest: float, num_micro_batches: int) -> None:
    rung = rung_of(largest)
    assert rung is not None
    one = round(largest / num_micro_batches * scale_of(rung))
    assert one * num_micro_batches < 2**63


@settings(max_examples=30)
@given(st.floats(2.0**-20, 3.4e38))
def test_the_largest_element_keeps_all_digits_of_fp32(largest: float) -> None:
    rung = rung_of(largest)
    assert rung is not None
    assert largest * scale_of(rung) >= 2**24


@settings(max_examples=30)
@given(st.floats(0, 3.4e38), st.floats(0, 3.4e38))
def test_the_common_rung_is_the_highest_of_the_ranks(one: float, other: float) -> None:
    assert rung_of(max(one, other)) == max(rung_of(one) or 0, rung_of(other) or 0)


def test_scales_are_powers_of_two_within_fp32() -> None:
    assert [math.frexp(scale_of(rung))[0] for rung in range(NUM_RUNGS)] == [0.5] * NUM_RUNGS
    assert scale_of(NUM_RUNGS - 1) > 2.0**-126
