"""Attention over a split sequence, and calls of the model with one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_workers.engine.parallel.context import ContextCall, attend
from shoal_workers.engine.parallel.head_tail import in_order, own_part


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_rows_of_all_ranks_together_are_the_full_attention(degree: int) -> None:
    q, k, v = torch.randn(2, 4, 24, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 2, 24, 6)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    parts = [attend(own_part(q, rank, degree, 2), k, v, rank, degree, scale=0.2) for rank in range(degree)]
    torch.testing.assert_close(in_order(torch.stack(parts), -2), whole, atol=1e-6, rtol=0)


B, T = 2, 8


class OneOfTwo:
    """A mesh as seen from its first rank."""

    def size(self) -> int:
        return 2

    def get_local_rank(self) -> int:
        return 0


def call() -> ContextCall:
    mesh: Any = OneOfTwo()
    return ContextCall({"tokens": 1, "positions": 0}, mesh)


def test_what_has_the_tokens_of_the_sequence_is_cut_and_the_rest_stays() -> None:
    tokens, positions, weight = torch.arange(B * T).view(B, T), torch.arange(T), torch.ones(B)
    args, kwargs = call().arguments((tokens, "name"), {"positions": positions, "inner": {"weight": weight}})
    assert args[0].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]] and args[1] == "name"
    assert kwargs["positions"].tolist() == [0, 1, 6, 7]
    assert kwargs["inner"]["weight"] is weight
    assert tokens.shape == (B, T)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("text", "no tensor that has a dim of plan.sequence ('tokens': 1, 'positions': 0)"),
        (torch.zeros(()), "no tensor that has a dim"),
        (torch.zeros(B, 0), "no tensor that has a dim"),
        (
            torch.zeros(B, 10),
            "10 tokens (plan.sequence: 'tokens': 1, 'positions': 0), which cp 2 cannot split into 2 x 2",
        ),
    ],
)
def test_a_call_that_cannot_be_cut_is_refused_with_the_way_out(argument: Tensor | str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call().arguments((argument,), {})
