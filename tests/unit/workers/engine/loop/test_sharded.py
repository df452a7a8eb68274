"""Models of loops that are sharded: what is wrapped, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout, fully_sharded, replicated
from shoal_workers.engine.group.gradient_buckets import sum_squares
from shoal_workers.engine.loop.sharded import ShardedGradients, begin_sums, plain_parameters, wrapped


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.leave = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def wrap(mesh: DeviceMesh, parallelism: Any, layout: Layout, blocks: Any = None) -> list[str]:
    """The modules that FSDP2 gathers one by one."""
    spec = parse_spec({"loop": {"file": "train.py"}, "parallelism": parallelism})
    model = Net()
    chosen = None if blocks is None else [model.get_submodule(name) for name in blocks]
    assert wrapped(model, spec, layout, mesh, chosen) is model
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_a_model_is_wrapped_block_by_block_if_the_spec_shards(mesh: DeviceMesh) -> None:
    fixed = {"dp_shard": "auto"}
    assert wrap(mesh, "auto", replicated(3)) == []
    assert wrap(mesh, fixed, fully_sharded(1)) == ["", "blocks.0", "blocks.1"]
    assert wrap(mesh, fixed, fully_sharded(1), blocks=["leave"]) == ["", "leave"]
    assert wrap(mesh, fixed, fully_sharded(1), blocks=[]) == [""]
    changed_later = wrap(mesh, "auto", fully_sharded(2))
    assert changed_later == ["", "blocks.0", "blocks.1"]


def test_a_block_of_another_model_is_refused(mesh: DeviceMesh) -> None:
    spec = parse_spec({"loop": {"file": "train.py"}, "parallelism": {"dp_shard": "auto"}})
    with pytest.raises(ValueError, match=r"run\.wrap\(blocks=\.\.\.\): Linear is no module of the model"):
        wrapped(Net(), spec, fully_sharded(1), mesh, [nn.Linear(1, 1)])


def test_parameters_of_a_module_that_is_not_tracked_are_refused(mesh: DeviceMesh) -> None:
    model = fully_shard(Net(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin_sums([model], {"optimizer": optimizer})
    with pytest.raises(TypeError, match=r"optimizer has sharded parameters of a module that is not tracked"):
        begin_sums([], {"optimizer": optimizer})


def test_the_squares_of_parts_and_of_whole_gradients_add_up_to_that_of_the_norm(mesh: DeviceMesh) -> None:
    torch.manual_seed(2)
    plain, sharded = Net(), Net()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded.blocks[0], mesh=mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    assert [isinstance(one, DTensor) for one in sharded.parameters()] == [True] * 2 + [False] * 4
    for model in (plain, sharded):
        model(torch.ones(3, 2)).sum().backward()
    parts = ShardedGradients(optimizer, num_replicas=2)
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
    cpu = torch.device("cpu")
    whole = sum_squares([p.grad for p in plain_parameters(optimizer) if p.grad is not None], cpu)
    assert float(2 * parts.squares(cpu) + whole) ** 0.5 == pytest.approx(expected, rel=1e-6)
    before = [part.clone() for part in parts.parts]
    parts.divide(4.0)
    assert all(torch.equal(part * 4, one) for part, one in zip(parts.parts, before, strict=True))
