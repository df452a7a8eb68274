"""How parameters, gradients and optimizer state are split over the mesh: one function per axis.

Gradients are summed over the ranks, never averaged: each micro-batch's loss already carries its share of the global
batch, and with an uneven deal the ranks' shares differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shoal_workers.contract.spec import Precision
from shoal_workers.engine.mesh import DP_SHARD


def shard_model(model: nn.Module, mesh: DeviceMesh, precision: Precision, units: Sequence[nn.Module]) -> None:
    """Shard `model` in place along the mesh's axes. Needs no communication."""
    _fully_shard_dp(model, mesh[DP_SHARD], precision, units)


def _fully_shard_dp(model: nn.Module, mesh: DeviceMesh, precision: Precision, units: Sequence[nn.Module]) -> None:
    """FSDP2 along dp_shard: `units` innermost first, then the root with what is left."""
    policy = _policy(precision)
    chosen = set(units) - {model}
    for module in reversed(list(model.modules())):
        if module in chosen:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # both settings reach one module only, not its children
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    match precision:
        case Precision.FP32:
            return MixedPrecisionPolicy()
        case Precision.BF16:
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
