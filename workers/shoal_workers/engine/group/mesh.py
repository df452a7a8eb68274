"""Layout -> DeviceMesh: one named axis for each way that the work is split, and the views of it that FSDP needs.

    root      pp | dp_replicate | shards | tp            axes of degree 1 are left out, outermost first
    shards  = dp_shard x cp                              dense parameters are split over all of it
            = expert_shards x ep                         whole experts over ep, and each expert over expert_shards

Every rank of a generation must call this with the same layout, because groups must be made in the same order with the
same names everywhere. Each group gets the finite timeout of the generation: the groups that a mesh makes for its axes
would otherwise wait for 30 minutes, whatever timeout init_process_group was given. Called by `Group.form`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal_workers.checkpoint.save_plan import REPLICATE
from shoal_workers.contract.layout import Layout
from shoal_workers.torch_internals import all_groups, set_group_timeout, unflatten

PP, SHARDS, TP = "pp", "shards", "tp"
DP_SHARD, CP = "dp_shard", "cp"
EXPERT_SHARDS, EP = "expert_shards", "ep"


@dataclass(frozen=True, slots=True)
class Meshes:
    """The meshes of one generation on one rank."""

    layout: Layout
    rank: int
    root: DeviceMesh
    dense: DeviceMesh
    """1-D: shards; or 2-D: replicas x shards."""
    experts: DeviceMesh | None
    """The mesh of the experts' parameters, like `dense`; None if ep is 1: they are split like all other parameters."""
    pp: DeviceMesh | None
    """1-D, like the following; None if the degree is 1."""
    cp: DeviceMesh | None
    tp: DeviceMesh | None
    ep: DeviceMesh | None

    def sum_over_data_ranks(self, tensor: Tensor) -> None:
        """Replace it by its sum over the ranks that have the same part of the model and other samples or tokens."""
        for axis in range(self.dense.ndim):
            if self.dense.size(axis) > 1:
                dist.all_reduce(tensor, group=self.dense.get_group(axis))


def build_mesh(layout: Layout, device_type: str, timeout_s: float, rank: int) -> Meshes:
    """The meshes of a generation; the default process group must be up."""
    timeout = timedelta(seconds=timeout_s)
    # The groups of a mesh's axes get this default, otherwise 30 minutes, and not init_process_group's timeout.
    dist.distributed_c10d.default_pg_timeout = timeout
    degrees = dict(zip((PP, REPLICATE, SHARDS, TP), layout.mesh_degrees, strict=True))
    # There is always an axis of shards, even of one rank: FSDP casts parameters to the precision of the computation,
    # even if nothing is split.
    sizes = {name: degree for name, degree in degrees.items() if degree > 1 or name == SHARDS}
    root = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    by_tokens = unflatten(root, SHARDS, (layout.dp_shard, layout.cp), (DP_SHARD, CP)) if layout.cp > 1 else root
    by_experts = root
    if layout.ep > 1:
        by_experts = unflatten(root, SHARDS, (layout.num_shards // layout.ep, layout.ep), (EXPERT_SHARDS, EP))
    for group in all_groups():
        set_group_timeout(timeout, group)
    return Meshes(
        layout=layout,
        rank=rank,
        root=root,
        dense=_with_replicas(root, SHARDS),
        experts=_with_replicas(by_experts, EXPERT_SHARDS) if layout.ep > 1 else None,
        pp=root[PP] if layout.pp > 1 else None,
        cp=by_tokens[CP] if layout.cp > 1 else None,
        tp=root[TP] if layout.tp > 1 else None,
        ep=by_experts[EP] if layout.ep > 1 else None,
    )


def _with_replicas(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    return mesh[REPLICATE, shards] if REPLICATE in (mesh.mesh_dim_names or ()) else mesh[shards]
