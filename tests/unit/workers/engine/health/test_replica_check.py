"""Checksums of replicated state: which ranks hold the same, which of them are wrong, and what a sum notices."""

from __future__ import annotations

import pytest
import torch

from shoal_workers.contract.layout import Layout
from shoal_workers.engine.health.replica_check import Difference, combine, find_difference, groups_of, host_sum


@pytest.mark.parametrize(
    ("layout", "sharded", "whole"),
    [
        (Layout(dp_shard=4), (), ()),
        (Layout(dp_replicate=3), ((0, 1, 2),), ((0, 1, 2),)),
        (Layout(dp_replicate=2, dp_shard=2), ((0, 2), (1, 3)), ((0, 2), (1, 3))),
        (Layout(dp_shard=2, tp=2), (), ((0, 1), (2, 3))),
        (Layout(dp_replicate=2, tp=2), ((0, 2), (1, 3)), ((0, 1, 2, 3),)),
        (Layout(pp=2, dp_replicate=2), ((0, 1), (2, 3)), ((0, 1), (2, 3))),
        (Layout(dp_replicate=2, cp=2), ((0, 2), (1, 3)), ((0, 2), (1, 3))),
    ],
)
def test_the_ranks_that_hold_the_same(layout: Layout, sharded: object, whole: object) -> None:
    assert groups_of(layout) == (sharded, whole)


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
@pytest.mark.parametrize("replicas", [3, 4])
def test_a_majority_names_the_rank_that_differs(replicas: int, wrong: int) -> None:
    if wrong < replicas:
        values = [[7, 0] for _ in range(replicas)]
        values[wrong] = [8, 0]
        found = find_difference(values, groups_of(Layout(dp_replicate=replicas)))
        assert found == Difference((wrong,), is_certain=True)


def test_without_a_majority_all_holders_are_suspected() -> None:
    assert find_difference([[1, 0], [2, 0]], groups_of(Layout(dp_replicate=2))) == Difference((0, 1), is_certain=False)
    three_ways = [[1, 0], [2, 0], [3, 0]]
    assert find_difference(three_ways, groups_of(Layout(dp_replicate=3))) == Difference((0, 1, 2), is_certain=False)
    one_shard_of_two = [[1, 0], [5, 0], [1, 0], [6, 0]]
    layout = Layout(dp_replicate=2, dp_shard=2)
    assert find_difference(one_shard_of_two, groups_of(layout)) == Difference((1, 3), is_certain=False)


def test_of_two_holders_the_one_with_finite_values_is_right() -> None:
    two = groups_of(Layout(dp_replicate=2))
    finite = [[True, True], [False, True]]
    assert find_difference([[1, 0], [2, 0]], two, are_finite=finite) == Difference((1,), is_certain=True)
    assert find_difference([[1, 0], [1, 0]], two, are_finite=finite) is None, "both hold the same"
    both = [[False, True], [False, True]]
    assert find_difference([[1, 0], [2, 0]], two, are_finite=both) == Difference((0, 1), is_certain=False)


def test_whole_tensors_on_tp_outvote_where_sharded_ones_cannot() -> None:
    values = [[1, 9], [2, 9], [1, 9], [2, 8]]
    found = find_difference(values, groups_of(Layout(dp_replicate=2, tp=2)))
    assert found == Difference((3,), is_certain=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1001])
def test_each_flipped_bit_changes_the_sum(dtype: torch.dtype, count: int) -> None:
    tensor = torch.arange(count, dtype=torch.float32).to(dtype)
    before = host_sum(tensor)
    octets = tensor.view(torch.uint8)
    for position in {0, octets.numel() // 2, octets.numel() - 1}:
        for bit in (0, 7):
            octets[position] ^= 1 << bit
            assert host_sum(tensor) != before
            octets[position] ^= 1 << bit
    assert host_sum(tensor) == before


def test_the_order_of_tensors_counts() -> None:
    assert combine([1, 2]) != combine([2, 1]) and combine([]) == 0
    assert 0 <= combine([2**64 - 1] * 9) < 2**64


def test_an_empty_part_and_one_that_is_not_contiguous_have_sums() -> None:
    assert host_sum(torch.empty(0)) == 0
    assert host_sum(torch.arange(6.0).reshape(2, 3).t()) == host_sum(torch.arange(6.0).reshape(2, 3).t().contiguous())
