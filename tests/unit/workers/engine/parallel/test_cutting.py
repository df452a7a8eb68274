"""DTensors are detached as torch does it, without its plan for the operation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal_workers.engine.parallel.cutting import replace_detach


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[DTensor]:
    """Rank 1's part of 7 x 2 elements on 3 ranks; no other rank exists. What `replace_detach` does is undone."""
    dispatcher = DTensor._op_dispatcher
    monkeypatch.setattr(dispatcher, "_custom_op_handlers", dict(dispatcher._custom_op_handlers))
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    yield distribute_tensor(torch.arange(14.0).view(7, 2), init_device_mesh("cpu", (3,)), [Shard(0)])
    dist.destroy_process_group()


def test_a_detached_tensor_shares_memory_and_layout(shard: DTensor) -> None:
    expected = shard.detach()
    replace_detach()
    parameter = nn.Parameter(shard)
    for found in (shard.detach(), parameter.detach(), parameter.data):
        assert isinstance(found, DTensor)
        assert (found._spec, found.requires_grad) == (expected._spec, False)
        assert found._local_tensor.data_ptr() == shard._local_tensor.data_ptr()


def test_nothing_is_planned_for_it(shard: DTensor) -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    planned: list[object] = []
    plan = propagator.propagate_op_sharding_non_cached
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            propagator, "propagate_op_sharding_non_cached", lambda schema: (planned.append(schema), plan(schema))[1]
        )
        torch._C._clear_DTensor_sharding_propagator_cache()
        propagator.propagate_op_sharding.cache_clear()
        replace_detach()
        shard.detach()
    assert planned == []
