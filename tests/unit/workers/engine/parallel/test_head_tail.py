"""Every token is on exactly one rank, and every rank has the same work under a causal mask."""

from __future__ import annotations

import pytest
import torch

from shoal_workers.engine.parallel.head_tail import by_rank, chunks_of, in_order, own_part

DEGREES = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("degree", DEGREES)
def test_each_chunk_is_on_one_rank(degree: int) -> None:
    held = [chunk for rank in range(degree) for chunk in chunks_of(rank, degree)]
    assert sorted(held) == list(range(2 * degree))


@pytest.mark.parametrize("degree", DEGREES)
def test_all_ranks_have_the_same_amount_of_work(degree: int) -> None:
    assert {sum(chunk + 1 for chunk in chunks_of(rank, degree)) for rank in range(degree)} == {2 * degree + 1}


@pytest.mark.parametrize("degree", DEGREES)
def test_the_parts_in_order_are_the_full_sequence(degree: int) -> None:
    whole = torch.arange(2 * 48 * 3).view(2, 48, 3)
    parts = by_rank(whole, degree, -2)
    assert parts.shape == (degree, 2, 48 // degree, 3)
    assert torch.equal(in_order(parts, -2), whole)
    assert all(torch.equal(parts[rank], own_part(whole, rank, degree, 1)) for rank in range(degree))


def test_a_rank_has_its_chunk_of_the_head_then_its_chunk_of_the_tail() -> None:
    assert own_part(torch.arange(16), 1, 4, 0).tolist() == [2, 3, 12, 13]
