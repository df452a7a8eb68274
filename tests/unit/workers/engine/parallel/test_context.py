"""A rank's attention computes only its rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shoal_workers.engine.parallel.context import attend
from shoal_workers.engine.parallel.head_tail import in_order, own_part


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_rows_of_all_ranks_together_are_the_full_attention(degree: int) -> None:
    q, k, v = torch.randn(2, 4, 24, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 2, 24, 6)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    parts = [attend(own_part(q, rank, degree, 2), k, v, rank, degree, scale=0.2) for rank in range(degree)]
    torch.testing.assert_close(in_order(torch.stack(parts), -2), whole, atol=1e-6, rtol=0)
