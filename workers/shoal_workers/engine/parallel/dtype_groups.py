"""Parameters of several dtypes in one FSDP unit: each dtype is gathered and reduced in a collective of its own.

FSDP2 packs the gradients of a unit into one tensor, so it refuses a unit whose trainable parameters differ in dtype.
But a unit may have several groups of parameters; torch itself makes them for parameters on several meshes. Here they
follow from the dtypes, in an order that is the same on every rank.

    float32, float64, bfloat16, ...     computed and reduced as the spec's precision says
    complex64, complex128, integers     computed and reduced as they are: no precision of real numbers can hold them

Uses private attributes of torch.distributed.fsdp; tests/dist/step/test_odd_tensors.py fails if a torch version changes
them. Called by `sharding` for every unit.
"""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def split_by_dtype(module: FSDPModule) -> None:
    """After fully_shard and its settings of communication, before anything runs."""
    state = module._get_fsdp_state()
    groups: list[FSDPParamGroup] = []
    for group in state._fsdp_param_groups:
        dtypes = dict.fromkeys(parameter.sharded_param.dtype for parameter in group.fsdp_params)
        parts = [group, *(_empty_like(group) for _ in list(dtypes)[1:])]
        parameters = group.fsdp_params
        for part, dtype in zip(parts, dtypes, strict=True):
            part.fsdp_params = [parameter for parameter in parameters if parameter.sharded_param.dtype == dtype]
            if not dtype.is_floating_point:
                part.mp_policy = MixedPrecisionPolicy()
        groups += parts
    state._fsdp_param_groups = groups


def _empty_like(group: FSDPParamGroup) -> FSDPParamGroup:
    made = FSDPParamGroup(
        [],
        group.modules,
        group.mesh_info,
        group.post_forward_mesh_info,
        group.device,
        None,
        group.mp_policy,
        group.offload_policy,
    )
    made._all_gather_comm, made._reduce_scatter_comm = group._all_gather_comm, group._reduce_scatter_comm
    return made
