"""Which groups a mesh makes. torch's fake backend makes groups of any size in one process, and connects none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal_workers.contract.layout import Layout
from shoal_workers.engine.group.mesh import build_mesh

pytestmark = pytest.mark.filterwarnings("ignore:Set timeout is now only supported")


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("layout", "others"),
    [
        (Layout(dp_shard=16), []),
        (Layout(dp_shard=8, cp=2), [2, 8]),
        (Layout(dp_shard=16, ep=4), [4, 4]),
        (Layout(tp=2, dp_shard=8), [2, 8]),
        (Layout(tp=16), [1]),
        (Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2), [2, 2, 2, 2]),
    ],
)
def test_the_world_group_is_the_only_one_of_all_ranks(world: None, layout: Layout, others: list[int]) -> None:
    meshes = build_mesh(layout, "cpu", 60.0, 5)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    assert sorted(group.size() for group in groups) == others, "each connects all pairs of its ranks"
    if meshes.root.size() == max(meshes.root.shape):
        axis = meshes.root.shape.index(16)
        assert meshes.root.get_group(axis) is dist.group.WORLD
