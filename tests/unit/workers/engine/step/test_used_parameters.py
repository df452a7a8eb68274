"""Counts of the ranks that have used a parameter, packed into numbers of the vote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.engine.step.gradients import UseCounts


@given(st.integers(1, 70), st.integers(0, 90), st.data())
def test_what_no_rank_has_used_is_found_in_the_sum(world_size: int, num_names: int, data: st.DataObject) -> None:
    names = [f"layer.{number}" for number in range(num_names)]
    each = [data.draw(st.sets(st.sampled_from(names))) if names else set() for _ in range(min(world_size, 3))]
    counts = UseCounts(names, world_size)
    sums = sum(counts.encoded(used) for used in each).tolist()
    assert counts.unused(sums) == [name for name in names if not any(name in used for used in each)]


@pytest.mark.parametrize("world_size", [1, 3, 1024, 16384])
def test_a_count_of_all_ranks_does_not_reach_its_neighbour(world_size: int) -> None:
    names = [f"layer.{number}" for number in range(9)]
    counts = UseCounts(names, world_size)
    sums = (counts.encoded(names[::2]) * world_size).tolist()
    assert counts.unused(sums) == names[1::2]
