"""Pipelines are cut so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal_service.planner.cuts import balanced, cut
from shoal_service.planner.shape import shape_of


def test_a_head_that_costs_as_much_as_a_block_counts_as_a_block() -> None:
    assert balanced([1.0] * 80, 16, 1.1) == (5,) * 14 + (6, 4)
    assert balanced([1.0] * 8, 4) == (2, 2, 2, 2)


@given(
    st.lists(st.sampled_from([0.3, 1.0, 2.2]), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 3.0]),
)
def test_no_other_cut_has_a_cheaper_slowest_stage(costs: list[float], num_stages: int, extra: float) -> None:
    num_stages = min(num_stages, len(costs))
    sizes = balanced(costs, num_stages, extra)
    assert sum(sizes) == len(costs) and min(sizes) >= 1 and len(sizes) == num_stages
    ends = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1)]
    assert _slowest(costs, sizes, extra) <= min(
        _slowest(costs, tuple(b - a for a, b in pairwise(end)), extra) for end in ends
    ) * (1 + 1e-5)


def _slowest(costs: list[float], sizes: tuple[int, ...], extra: float) -> float:
    start, most = 0, 0.0
    for place, size in enumerate(sizes):
        most = max(most, sum(costs[start : start + size]) + (extra if place == len(sizes) - 1 else 0.0))
        start += size
    return most


def test_in_a_v_the_first_rank_has_both_ends(job: Any) -> None:
    shape = shape_of(job({"num_layers": 8}))
    assert shape is not None
    v, straight = cut(shape, 2, 2, is_v_shaped=True), cut(shape, 2, 1, is_v_shaped=False)
    first, _, last = v.extremes
    assert (first.has_embedding, first.has_head, last.has_head) == (True, True, False)
    first, _, last = straight.extremes
    assert (first.has_embedding, first.has_head, last.has_head) == (True, False, True)
    assert sum(v.stages) == sum(straight.stages) == 8
