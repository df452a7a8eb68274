"""The grid of a step's gradients: a function of their largest element, and sums of its multiples are exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_workers.engine.deterministic.exact_gradients import NUM_RUNGS, grid_of, round_to_grid, rung_of


@pytest.mark.parametrize(
    ("largest", "rung"),
    [(0.0, 0), (63.99, 0), (64.0, 1), (2.0**18, 2), (3.4e38, 11), (math.inf, None), (math.nan, None)],
)
def test_rungs_begin_at_the_values_of_the_table(largest: float, rung: int | None) -> None:
    assert rung_of(largest) == rung


@settings(max_examples=30)
@given(st.floats(0, 3.4e38), st.integers(1, 100_000))
def test_the_sum_of_all_micro_batches_is_exact_in_float64(largest: float, num_micro_batches: int) -> None:
    rung = rung_of(largest)
    assert rung is not None
    one = round(largest / num_micro_batches / grid_of(rung))
    assert (one + 1) * num_micro_batches < 2**53


@settings(max_examples=30)
@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=50), st.integers(0, NUM_RUNGS - 1))
def test_values_become_the_nearest_multiples_and_their_sum_has_no_order(parts: list[float], rung: int) -> None:
    limit = grid_of(rung) * 2**51
    values = torch.tensor(parts, dtype=torch.float64) * limit
    rounded = round_to_grid(values.clone(), rung)
    multiples = [int(value / grid_of(rung)) for value in rounded.tolist()]
    assert [multiple * grid_of(rung) for multiple in multiples] == rounded.tolist()
    assert ((rounded - values).abs() <= grid_of(rung) / 2).all()
    weighted = round_to_grid(values / len(parts), rung).tolist()
    assert sum(weighted) == sum(reversed(weighted)) == sum(sorted(weighted))


@settings(max_examples=30)
@given(st.floats(2.0**-20, 3.4e38))
def test_the_largest_element_keeps_all_digits_of_fp32(largest: float) -> None:
    rung = rung_of(largest)
    assert rung is not None
    assert largest / grid_of(rung) >= 2**24


@settings(max_examples=30)
@given(st.floats(0, 3.4e38), st.floats(0, 3.4e38))
def test_the_common_rung_is_the_highest_of_the_ranks(one: float, other: float) -> None:
    assert rung_of(max(one, other)) == max(rung_of(one) or 0, rung_of(other) or 0)


def test_grids_are_powers_of_two() -> None:
    assert [math.frexp(grid_of(rung))[0] for rung in range(NUM_RUNGS)] == [0.5] * NUM_RUNGS
