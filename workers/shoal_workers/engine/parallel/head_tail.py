"""The tokens of a context-parallel rank: one chunk from the head of the sequence and one from its tail.

    chunk      0   1   2   3   4   5   6   7        T tokens in 2 x degree equal chunks, degree 4
    rank       0   1   2   3   3   2   1   0

Under a causal mask a query of chunk i attends to i + 1 chunks of keys, so rank r computes r + 1 and 2 x degree - r of
them: 2 x degree + 1 on every rank (Dubey et al. 2024, section 3.3.2). Pure functions of tensors. `context` calls them
for batches and for attention's operands, `experts` for the counts of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunks_of(rank: int, degree: int) -> tuple[int, int]:
    """The two chunks of `rank`, in its order."""
    return rank, 2 * degree - 1 - rank


def own_part(whole: Tensor, rank: int, degree: int, dim: int) -> Tensor:
    """`rank`'s T / degree tokens of all T along `dim`, which 2 x degree must divide. A copy."""
    chunks = whole.chunk(2 * degree, dim)
    assert len(chunks) == 2 * degree and chunks[0].shape == chunks[-1].shape, "T is a multiple of 2 x degree"
    head, tail = chunks_of(rank, degree)
    return torch.cat((chunks[head], chunks[tail]), dim)


def by_rank(whole: Tensor, degree: int, dim: int) -> Tensor:
    """(..., T, ...) -> (degree, ..., T / degree, ...): every rank's part. `dim` counts from the end: negative."""
    assert dim < 0
    return torch.stack([own_part(whole, rank, degree, dim) for rank in range(degree)])


def in_order(parts: Tensor, dim: int) -> Tensor:
    """Inverse of `by_rank`: (degree, ..., T / degree, ...) -> (..., T, ...), tokens in their natural order."""
    assert dim < 0
    heads, tails = parts.chunk(2, dim)
    return torch.cat((*heads.unbind(), *reversed(tails.unbind())), dim)
