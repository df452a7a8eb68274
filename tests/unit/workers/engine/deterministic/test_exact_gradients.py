"""The grid of exact gradients, and the layout of their accumulators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from shoal_workers.engine.deterministic.exact_gradients import (
    NUM_RUNGS,
    Slot,
    chunk_numel,
    grid_of,
    round_to_grid,
    rung_of,
)


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


NONE: Any = None


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (21, 3), (4, 2, 5), (29, 1), (6, 4)])
def test_each_rank_s_row_is_its_chunk_padded(world_size: int, shape: tuple[int, ...]) -> None:
    whole = torch.arange(1, torch.Size(shape).numel() + 1).view(shape)
    width = chunk_numel(torch.Size(shape), world_size)
    accumulator = torch.zeros(world_size, width + 3, dtype=torch.float64)
    slot = Slot(nn.Identity(), "weight", NONE, accumulator[:, 1 : 1 + width])
    for _ in range(2):
        for piece, sums in slot.pieces(whole.flatten()):
            sums += piece
    for rank, chunk in enumerate(_chunk_with_empty(whole, world_size, dim=0)):
        expected = torch.zeros(width, dtype=torch.float64)
        expected[: chunk.numel()] = 2 * chunk.flatten()
        assert torch.equal(slot.sums[rank], expected)
    assert not accumulator[:, 0].any() and not accumulator[:, 1 + width :].any()
