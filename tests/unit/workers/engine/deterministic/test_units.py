"""The accumulator's columns are the chunks that FSDP2 gives to each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from shoal_workers.engine.deterministic.exact_gradients import Slot, chunk_numel

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
