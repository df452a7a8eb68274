"""Layout -> DeviceMesh: one named axis for each way that the work is split.

Every member of a generation must call this with the same layout, for groups are made in the same order with the same
names everywhere. Each group gets the finite timeout of the generation: those that a mesh makes for its axes would
otherwise wait for 30 minutes whatever init_process_group was told.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal_workers.contract.layout import Layout

DP_SHARD = "dp_shard"


def build_mesh(layout: Layout, device_type: str, timeout_s: float) -> DeviceMesh:
    """The mesh of a generation; the default process group must be up."""
    assert layout.world_size == layout.dp_shard, f"this engine runs the dp_shard axis only, not {layout.describe()}"
    timeout = timedelta(seconds=timeout_s)
    dist.distributed_c10d.default_pg_timeout = timeout
    mesh = init_device_mesh(device_type, (layout.dp_shard,), mesh_dim_names=(DP_SHARD,))
    for axis in mesh.mesh_dim_names or ():
        dist.distributed_c10d._set_pg_timeout(timeout, mesh.get_group(axis))
    return mesh
