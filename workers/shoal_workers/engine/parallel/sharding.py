"""The data axis: how parameters, gradients and optimizer state are split over the mesh of shards, with FSDP2.

Applied last, to modules whose parameters other axes may have split before. Gradients are summed over the ranks, never
averaged: each micro-batch's loss is already weighted by its share of the global batch, and with an uneven partition the
ranks' shares differ. Called by `assemble` and `warm_up`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shoal_workers.contract.layout import Layout, ShardLevel
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.parallel.collective_order import CollectiveOrder
from shoal_workers.engine.parallel.dtype_groups import split_by_dtype


def shard_model(
    model: nn.Module,
    meshes: Meshes,
    policy: MixedPrecisionPolicy,
    units: Sequence[nn.Module],
    experts: Collection[nn.Module] = (),
) -> CollectiveOrder:
    """Shard `model` in place. Needs no communication.

    Args:
        policy: the dtypes of computation and reduction, see parallel/compression.py.
        units: modules whose parameters are gathered together; innermost first, then the root with all others.
        experts: modules whose parameters the ep axis has split already; FSDP splits them over the rest of the shards.
    """
    assert meshes.experts is not None or not experts
    if meshes.experts is not None:
        for module in experts:
            _fully_shard(module, meshes.experts, meshes.layout, policy)
    chosen = set(units) - {model}
    for module in reversed(list(model.modules())):
        if module in chosen:
            _fully_shard(module, meshes.dense, meshes.layout, policy)
    _fully_shard(model, meshes.dense, meshes.layout, policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # both settings apply to one module only, not to its children
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # while gradients of a CPU are summed nothing else happens
    streams = meshes.dense.device_type != "cpu" and meshes.layout.pp == 1
    return CollectiveOrder(model, meshes.dense, is_whole=keeps_gathered(meshes.layout), streams=streams)


def keeps_gathered(layout: Layout) -> bool:
    """Whether parameters stay whole from their first forward pass in a step to its last backward pass.

    If they were resharded in between, zero-bubble schedules of torch 2.13 would compute wrong gradients without an
    error.
    """
    return layout.shard is not ShardLevel.FULL or layout.pp > 1


def reduces_once(layout: Layout) -> bool:
    """Whether gradients stay whole until the last micro-batch of a step."""
    return layout.shard is ShardLevel.OPTIMIZER or layout.pp > 1


def _fully_shard(module: nn.Module, mesh: DeviceMesh, layout: Layout, policy: MixedPrecisionPolicy) -> None:
    shards = mesh.size(mesh.ndim - 1)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if layout.offload else OffloadPolicy()
    sharded = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=not keeps_gathered(layout),
        shard_placement_fn=lambda parameter: _placement(parameter, shards),
        mp_policy=policy,
        offload_policy=offload,
    )
    split_by_dtype(sharded)


def _placement(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    """The dim to split: not a dim that another axis has split, if another one divides evenly.

    None: FSDP2's default, dim 0, which is the only dim that it can split unevenly."""
    if not isinstance(parameter, DTensor):
        return None
    taken = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
    if 0 not in taken:
        return None
    free = [dim for dim in range(parameter.ndim) if dim not in taken and parameter.shape[dim] % num_shards == 0]
    return Shard(free[0]) if free else None
