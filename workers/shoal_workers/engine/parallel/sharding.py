"""The data axis: how parameters, gradients and optimizer state are split over the mesh of shards. Hides FSDP2, and what
it cannot do by itself: units of several dtypes or precisions, hooks of parameters that it replaces.

Applied last, to modules whose parameters other axes may have split before. Gradients are summed over the ranks, never
averaged: each micro-batch's loss is already weighted by its share of the global batch, and with an uneven partition the
ranks' shares differ.

    units           a unit's parameters are gathered before its forward and freed after it, so units should be the
                    blocks that run one after the other; all other parameters belong to the root
    parameters      fp32, sharded; gathered and used in the compute dtype
    gradients       summed over ranks, and over a rank's micro-batches before that, in the reduction dtype
    optimizer       fp32

A reduction in bf16 or fp16 halves what data-parallel ranks send, as DDP's bf16_compress_hook and fp16_compress_hook do.
In return every addition rounds to 8 or 11 bits, including those of gradient accumulation, because FSDP2 accumulates in
the dtype that it sends. The result then also depends more on the world size than in fp32.

Sharding replaces every parameter, and autograd differentiates the gathered one, so a hook that a model has registered
on a parameter (`Tensor.register_hook`) would never run: it is moved to what takes the parameter's place. So are the
attributes that a model has set on a parameter (`lr_scale`), which optimizers read. Called by `assemble`, `warm_up` and,
for the units, by `LoadedTask.shard_units`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from shoal_workers.contract.layout import Layout, ShardLevel
from shoal_workers.contract.spec import Precision
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.group.rounded_sums import RoundedSums
from shoal_workers.engine.parallel.collective_order import CollectiveOrder
from shoal_workers.engine.parallel.cutting import user_attributes
from shoal_workers.torch_internals import (
    FSDPParamGroup,
    collectives_of,
    fsdp_groups,
    gathered,
    gradient_hooks,
    has_hooks_after_accumulation,
    module_of,
    policy_of,
    set_collectives,
    set_fsdp_groups,
    set_policy,
)


def shard_model(
    model: nn.Module,
    meshes: Meshes,
    policy: MixedPrecisionPolicy,
    units: Sequence[nn.Module],
    experts: Collection[nn.Module] = (),
    policies: Mapping[nn.Module, MixedPrecisionPolicy] | None = None,
    rounded: RoundedSums | None = None,
) -> CollectiveOrder:
    """Shard `model` in place. Needs no communication.

    Args:
        policy: the dtypes of computation and reduction, see parallel/sharding.py.
        units: modules whose parameters are gathered together; innermost first, then the root with all others.
        experts: modules whose parameters the ep axis has split already; FSDP splits them over the rest of the shards.
        policies: the policies of modules whose dtypes differ from `policy`.
        rounded: adds up gradients over the shards.
    """
    policies = policies or {}
    assert meshes.experts is not None or not experts
    if meshes.experts is not None:
        for module in experts:
            _fully_shard(module, meshes.experts, meshes.layout, policy, policies)
    chosen = set(units) - {model}
    for module in reversed(list(model.modules())):
        if module in chosen:
            _fully_shard(module, meshes.dense, meshes.layout, policy, policies)
    _fully_shard(model, meshes.dense, meshes.layout, policy, policies)
    sum_gradients(model)
    # while gradients of a CPU are summed nothing else happens
    streams = meshes.dense.device_type != "cpu" and meshes.layout.pp == 1
    return CollectiveOrder(
        model,
        meshes.dense,
        is_whole=keeps_gathered(meshes.layout),
        streams=streams,
        reduces_once=meshes.layout.shard is ShardLevel.OPTIMIZER or meshes.layout.pp > 1,
        rounded=rounded,
    )


def sum_gradients(model: nn.Module) -> None:
    """Has FSDP2 add up gradients over the ranks, and divide by nothing."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # both settings apply to one module only, not to its children
            module.set_gradient_divide_factor(1.0)
            # FSDP would pass a factor as PREMUL_SUM, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def keeps_gathered(layout: Layout) -> bool:
    """Return whether parameters stay whole from their first forward pass in a step to its last backward pass.

    If they were resharded in between, zero-bubble schedules of torch 2.13 would compute wrong gradients without an
    error.
    """
    return layout.shard is not ShardLevel.FULL or layout.pp > 1


def _fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    layout: Layout,
    policy: MixedPrecisionPolicy,
    policies: Mapping[nn.Module, MixedPrecisionPolicy],
) -> None:
    shards = mesh.size(mesh.ndim - 1)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if layout.offload else OffloadPolicy()
    sharded = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=not keeps_gathered(layout),
        shard_placement_fn=lambda parameter: _placement(parameter, shards),
        mp_policy=policies.get(module, policy),
        offload_policy=offload,
    )
    split_by_dtype(sharded, policy, policies)


def _placement(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    """The dim to split: not a dim that another axis has split, if another one divides evenly.

    None means FSDP2's default, dim 0, which is the only dim that it can split unevenly."""
    if not isinstance(parameter, DTensor):
        return None
    taken = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
    if 0 not in taken:
        return None
    free = [dim for dim in range(parameter.ndim) if dim not in taken and parameter.shape[dim] % num_shards == 0]
    return Shard(free[0]) if free else None


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def default_shard_units(model: nn.Module) -> list[nn.Module]:
    """Children of every nn.ModuleList, and children of every nn.Sequential that are themselves made of modules.

    The root gets containers (they have no forward of their own), children without parameters, and children that share a
    parameter with a module outside of them (tied weights must be gathered together).
    """
    owners: dict[int, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(module)
    return [unit for unit in dict.fromkeys(_blocks(model)) if _is_closed(unit, owners)]


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from (child for child in module if not isinstance(child, CONTAINERS))
        elif isinstance(module, nn.Sequential):
            yield from (child for child in module if any(True for _ in child.children()))


def _is_closed(unit: nn.Module, owners: dict[int, set[nn.Module]]) -> bool:
    inside = set(unit.modules())
    parameters = list(unit.parameters())
    return bool(parameters) and all(owners[id(parameter)] <= inside for parameter in parameters)


_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def mixed_precision(compute: Precision, reduction: Precision = Precision.FP32) -> MixedPrecisionPolicy:
    """The policy of every fully_shard of a model. fp32 for both casts nothing."""
    if compute is Precision.FP32 and reduction is Precision.FP32:
        return MixedPrecisionPolicy()
    param_dtype = None if compute is Precision.FP32 else _DTYPES[compute]
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=_DTYPES[reduction])


def compute_dtype(compute: Precision) -> torch.dtype:
    """The dtype of activations."""
    return _DTYPES[compute]


def split_by_dtype(
    module: FSDPModule, policy: MixedPrecisionPolicy, policies: Mapping[nn.Module, MixedPrecisionPolicy]
) -> None:
    """Called after fully_shard and its settings of communication, before anything runs. Parameters of one dtype and one
    policy are gathered together."""

    def kind_of(record: Any) -> tuple[torch.dtype, MixedPrecisionPolicy]:
        dtype: torch.dtype = record.sharded_param.dtype
        # Neither integers nor complex numbers may be cast to bf16 or fp16.
        return dtype, policies.get(module_of(record)[0], policy) if dtype.is_floating_point else MixedPrecisionPolicy()

    groups: list[FSDPParamGroup] = []
    for group in fsdp_groups(module):
        kinds = dict.fromkeys(kind_of(parameter) for parameter in group.fsdp_params)
        parts = [group, *(_empty_like(group) for _ in list(kinds)[1:])]
        parameters = group.fsdp_params
        for part, kind in zip(parts, kinds, strict=True):
            part.fsdp_params = [parameter for parameter in parameters if kind_of(parameter) == kind]
            set_policy(part, kind[1])
        groups += parts
    set_fsdp_groups(module, groups)


def _empty_like(group: FSDPParamGroup) -> FSDPParamGroup:
    made = FSDPParamGroup(
        [],
        group.modules,
        group.mesh_info,
        group.post_forward_mesh_info,
        group.device,
        None,
        policy_of(group),
        group.offload_policy,
    )
    set_collectives(made, *collectives_of(group))
    return made


Hook = Callable[[Tensor], Tensor | None]
Place = tuple[int, str]
"""Id of a module, and its attribute."""


@dataclass(frozen=True, slots=True)
class HookedParameter:
    """A parameter of the whole model with its hooks."""

    name: str
    parameter: nn.Parameter
    hooks: tuple[Hook, ...]


def hooked_parameters(model: nn.Module) -> list[HookedParameter]:
    """Raises ValueError with the name of a parameter whose hook cannot have a result that is the same at any size."""
    hooked = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if has_hooks_after_accumulation(parameter):
            raise ValueError(
                f"{name} has a hook of register_post_accumulate_grad_hook, which would see the gradients of one "
                "worker's micro-batches only. Use register_hook, which sees that of each micro-batch; or change "
                "gradients in the step() of an optimizer that build_optimizer returns."
            )
        hooks = gradient_hooks(parameter)
        if hooks:
            hooked.append(HookedParameter(name, parameter, hooks))
    return hooked


@dataclass(frozen=True, slots=True)
class Additions:
    """What a model has added to a parameter."""

    hooks: tuple[Hook, ...]
    attributes: Mapping[str, Any]


def places_of(hooked: Sequence[HookedParameter], part: nn.Module) -> dict[Place, Additions]:
    """Returns where the parameters of a part with hooks or attributes are, once all axes but data are applied.

    Raises ValueError for one that has been split."""
    for place in hooked:
        path, _, attribute = place.name.rpartition(".")
        owner = part
        for step in path.split(".") if path else ():
            owner = getattr(owner, step, owner)
        there = owner._parameters.get(attribute)
        if there is not None and there is not place.parameter:
            raise ValueError(
                f"{place.name} has a gradient hook and is split by the plan, so the hook would see a part of the "
                "gradient. Take the hook away, or leave the module out of plan.tensor and plan.experts."
            )
    hooks = {id(place.parameter): place.hooks for place in hooked}
    return {
        (id(module), name): Additions(hooks.get(id(parameter), ()), attributes)
        for module in part.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if (attributes := user_attributes(parameter)) or id(parameter) in hooks
    }


def move_additions(places: Mapping[Place, Additions], part: nn.Module) -> None:
    """Called once the data axis has been applied to the part."""
    for module in part.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in fsdp_groups(module):
            records: list[Any] = group.fsdp_params
            for record in records:
                owner, attribute = module_of(record)
                if (additions := places.get((id(owner), attribute))) is not None:
                    vars(record.sharded_param).update(additions.attributes)
                    record.init_unsharded_param = _adding(record, record.init_unsharded_param, additions)


def _adding(record: Any, init: Callable[[], None], additions: Additions) -> Callable[[], None]:
    def init_unsharded_param() -> None:
        # FSDP calls this at every gathering, and makes the parameter at the first one only.
        is_first = gathered(record) is None
        init()
        if is_first:
            vars(gathered(record)).update(additions.attributes)
            for hook in additions.hooks:
                gathered(record).register_hook(hook)

    return init_unsharded_param
