"""DTensor's all-reduce goes through the plain collective."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from shoal_workers.engine.group.collectives import replace_functional_all_reduce


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("operation", ["sum", "max"])
def test_the_result_is_a_new_tensor(group: dist.ProcessGroup, operation: str) -> None:
    replace_functional_all_reduce()
    replace_functional_all_reduce()
    given = torch.arange(6.0).view(2, 3).t()
    reduced = functional.all_reduce(given, operation, group)
    assert torch.equal(reduced, given)
    assert reduced.data_ptr() != given.data_ptr()
