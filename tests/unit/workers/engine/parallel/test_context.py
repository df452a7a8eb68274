"""Batches are split as the plan says, wrong ones are refused by name, and a rank's attention computes only its rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.engine.parallel.context import attend, shard_batch
from shoal_workers.engine.parallel.head_tail import in_order, own_part

PLAN = ParallelPlan(sequence={"tokens": 1, "positions": 0})


def batch(**changes: Any) -> dict[str, Any]:
    return {"tokens": torch.arange(16).view(2, 8), "positions": torch.arange(8), "weight": torch.ones(2), **changes}


def test_named_entries_are_split_and_others_are_unchanged() -> None:
    whole = batch()
    part = shard_batch(whole, PLAN, rank=0, degree=2)
    assert part["tokens"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert part["positions"].tolist() == [0, 1, 6, 7]
    assert part["weight"] is whole["weight"]
    assert whole["tokens"].shape == (2, 8)


def test_one_rank_gets_the_whole_batch_unchanged() -> None:
    anything = object()
    assert shard_batch(anything, PLAN, rank=0, degree=1) is anything


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((torch.zeros(2, 8),), "must be a dict; the task's collate returned tuple"),
        ({"tokens": torch.zeros(2, 8)}, "'positions': 0 is not a tensor of the batch, which has only 'tokens'"),
        (batch(positions=[1, 2]), "'positions': 0 is not a tensor of the batch, which holds list there"),
        (batch(tokens=torch.zeros(8)), "'tokens': 1 names a dim that the entry does not have: its shape is (8,)"),
        (batch(tokens=torch.zeros(2, 10)), "'tokens': 1 has 10 tokens, which cp 2 cannot split into 2 x 2"),
        (batch(tokens=torch.zeros(2, 0)), "'tokens': 1 has 0 tokens"),
    ],
)
def test_a_batch_that_does_not_fit_the_plan_is_refused_by_name(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        shard_batch(wrong, PLAN, rank=1, degree=2)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_rows_of_all_ranks_together_are_the_full_attention(degree: int) -> None:
    q, k, v = torch.randn(2, 4, 24, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 2, 24, 6)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    parts = [attend(own_part(q, rank, degree, 2), k, v, rank, degree, scale=0.2) for rank in range(degree)]
    torch.testing.assert_close(in_order(torch.stack(parts), -2), whole, atol=1e-6, rtol=0)
