"""Replay names the one rank that two others outvote on any micro-batch, and no rank if the votes are not clear."""

from __future__ import annotations

import pytest

from shoal_workers.engine.health.replay import name_the_odd_one


def honest(world_size: int) -> list[list[int]]:
    return [[100 + (rank + k) % world_size for k in range(3)] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [3, 4, 5, 8])
@pytest.mark.parametrize("places", [(0,), (1,), (2,), (0, 1, 2)])
def test_the_rank_that_differs_is_named(world_size: int, places: tuple[int, ...]) -> None:
    for liar in range(world_size):
        values = honest(world_size)
        for place in places:
            values[liar][place] += 1
        assert name_the_odd_one(values) == liar


def test_no_rank_is_named_if_two_ranks_differ_on_different_micro_batches() -> None:
    values = honest(6)
    values[0][0] += 1
    values[3][0] += 1
    assert name_the_odd_one(values) is None


def test_three_different_results_of_one_micro_batch_name_no_rank() -> None:
    values = honest(5)
    values[2][0] += 1
    values[1][1] += 2
    assert name_the_odd_one(values) is None


def test_a_nondeterministic_task_names_no_rank() -> None:
    assert name_the_odd_one([[10 * rank + k for k in range(3)] for rank in range(4)]) is None


def test_two_ranks_cannot_outvote_each_other() -> None:
    assert name_the_odd_one([[1, 2, 3], [4, 5, 6]]) is None
