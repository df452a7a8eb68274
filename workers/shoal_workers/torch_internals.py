"""Wraps every private name of torch that Shoal uses.

A new version of torch can break only this module: tests/unit/tree/test_torch_internals.py checks that no other module
uses a private name. Each entry states

    why          what Shoal does with it
    without      what doing without would cost
    public       the public alternative, if there is one

Names that are written as private but that every extension of torch relies on are in `WIDELY_USED`; they may stand
anywhere. Operators (`torch.ops.aten._scaled_mm`) are names of the dispatcher, not private names of a module.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroupGloo
from torch._ops import OpOverload
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor import _redistribute as redistribute
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import _RECOMPUTE as RECOMPUTE

__all__ = [
    "RECOMPUTE",
    "BatchNorm",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "Dropout",
    "FSDPParamGroup",
    "InstanceNorm",
    "OpOverload",
    "ProcessGroupGloo",
    "TorchDispatchMode",
    "functional_collectives",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]

WIDELY_USED = frozenset(
    {
        "_buffers",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
        "_version",
    }
)
"""Attributes of nn.Module and Tensor. They are where a module keeps what it registers, and how often a tensor was
written in place. Public: named_buffers() and others list them, but nothing replaces or removes one without them."""

# Imported above:
#
# ProcessGroupGloo         why: its constructor is replaced by one with a deadline. without: a rank that dies while its
#                          group connects costs ten minutes. public: torch.distributed.ProcessGroupGloo, the same class
# functional_collectives   why: collectives of a task's code are refused there, too. without: they hang a job whose
#                          ranks have different numbers of micro-batches. public: none
# DefaultAllGather,        why: the collectives of FSDP2 are wrapped, to order them and to send small ones directly.
# DefaultReduceScatter     without: a model that runs other blocks for other samples hangs. public: the protocols of
#                          FSDPModule.set_custom_all_gather, not what is used when none is set
# FSDPParamGroup           why: a unit with parameters of several dtypes gets a group of each. without: such models are
#                          refused. public: none
# FSDPParam                why: tells which of the two ways of summing over micro-batches this torch has, see
#                          _SUMS_ARE_GRADIENTS. without: a comparison of version numbers. public: none
# BatchNorm, InstanceNorm, why: the common base of the 1-, 2- and 3-dimensional ones. without: lists of classes.
# Dropout                  public: the classes themselves
# TorchDispatchMode        why: to see every operation of a build, and the numbers that are read of DTensors. without: a
#                          build that writes the whole model. public: none; its documentation names this path
# OpOverload               why: the type of what a dispatch mode gets. without: Any. public: none
# tree_leaves, tree_map,   why: tensors in nested arguments. without: 30 lines. public: torch.utils.pytree since 2.10
# tree_map_only
# RECOMPUTE                why: a zero-bubble schedule recomputes a block several times, so the mark that a result is to
#                          be recomputed must stay. without: no selective recomputation with these schedules. public:
#                          none

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""Why: a tensor subclass calls torch on itself. Without: endless recursion. Public: none; torch's documentation on
extending names this path."""


# --- Process groups ---------------------------------------------------------------------------------------------------


def all_groups() -> list[dist.ProcessGroup]:
    """Why: the groups that a mesh has made get a timeout, are woken, and are dropped last. Without: groups of a mesh
    wait for 30 minutes, and a group that is still referred to keeps its sockets. Public: none."""
    return list(dist.distributed_c10d._world.pg_map)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Why: see `all_groups`. Public: torch.distributed.set_timeout, since 2.14; before, ProcessGroup.set_timeout,
    which the groups of a mesh do not pass on."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def forget_group_names() -> None:
    """Why: names of groups are counted, and ranks that failed at different groups would use different names in the next
    generation. Without: they wait for each other. Public: none."""
    dist.distributed_c10d._world.group_count = 0


def group_named(name: str) -> dist.ProcessGroup:
    """Why: a functional collective has the name of its group only. Public: none."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def abort_nccl() -> None:
    """Why: to wake ranks that wait in NCCL. Public: `ProcessGroup.abort`, which aborts the default backend only.

    All communicators at once: an abort sets its communicator's flag first and then frees memory, for which CUDA waits
    until the device is idle. One after the other, the first would wait for the kernels of the second, which end only
    with theirs (github.com/NVIDIA/nccl/issues/1013; seen with dp_replicate x dp_shard). torch's own
    `_abort_process_group` aborts in one NCCL group, but also forgets all groups, which is for the training thread.
    """
    backends = [group._get_backend(torch.device("cuda")) for group in all_groups()]
    threads = [threading.Thread(target=backend.abort, name="shoal-nccl-abort", daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- Meshes and DTensor -----------------------------------------------------------------------------------------------


def unflatten(mesh: DeviceMesh, axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Why: the axis of shards is seen as dp_shard x cp, and as expert_shards x ep. Without: a mesh, with groups, for
    each of the views. Public: none for this direction; `DeviceMesh._flatten` is private, too."""
    return mesh._unflatten(axis, sizes, names)


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Why: a parameter that ep and tp both split. Without: no experts under tp. Public: none."""
    return DeviceMesh._concatenate(meshes)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Why: it keeps the groups of its views, see `groups_by_name`. Public: none."""
    return mesh._get_root_mesh()


def groups_by_name(root: DeviceMesh) -> Any:
    """Why: a model outlives its groups, so its meshes must forget them, and find those of the next generation. Without:
    the model is built again after each change of the group. Public: none."""
    return root._pg_registry


def group_names(mesh: DeviceMesh) -> list[str]:
    """Why: a mesh finds the groups of the next generation if they have the names of the last. Public: none."""
    return [str(name) for name in mesh._dim_group_names]


def spec_of(tensor: DTensor) -> Any:
    """Why: a DTensor of another tensor's layout, without computing the layout again for each of hundreds of tensors.
    Without: 0.1 ms each. Public: DTensor.from_local, which computes it."""
    return tensor._spec


def local_of(tensor: DTensor) -> Tensor:
    """Why: the model's own local tensor, whose memory is exchanged. Public: to_local, which returns a view of it."""
    return tensor._local_tensor


def replace_dtensor_operation(operation: Any, replacement: Callable[..., DTensor]) -> None:
    """Why: DTensors are detached without planning. Without: 0.3 s after each change of the group. Public: none."""
    DTensor._op_dispatcher._custom_op_handlers[operation] = replacement


def keep_random_states(mesh: DeviceMesh) -> None:
    """Why: in a process's first random operation on DTensors of a GPU, torch broadcasts rank 0's generator state over
    the default group. Without: a communicator of all ranks; and a new worker waits for survivors, which have done so in
    an earlier generation. Public: none."""
    if dtensor_random._rng_tracker is None:
        dtensor_random._rng_tracker = dtensor_random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def clear_dtensor_caches() -> None:
    """Why: DTensor caches by mesh, and a mesh equals that of the next generation although its groups are different.
    Without: an operation resolves a group that no longer exists. Public: none.

    The sharding caches are per thread, so this must run on the training thread.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    propagator._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute.clear_redistribute_planner_cache()
    for value in vars(redistribute).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()


# --- FSDP2: units, their groups of parameters, and the record of each parameter ---------------------------------------
#
# Why: FSDP2's public functions shard a model and step it. They neither let a model change its groups, nor its memory,
# nor the order of its collectives. Without: no model survives a change of the group, no state in shared memory, no
# model that runs different blocks on different ranks. Public: none, unless an entry says otherwise.


def fsdp_groups(unit: FSDPModule) -> list[Any]:
    """FSDP's groups of a unit's parameters; each has the records of its parameters as `fsdp_params`."""
    groups: list[Any] = unit._get_fsdp_state()._fsdp_param_groups
    return groups


def set_fsdp_groups(unit: FSDPModule, groups: list[FSDPParamGroup]) -> None:
    unit._get_fsdp_state()._fsdp_param_groups = groups


def policy_of(group: Any) -> MixedPrecisionPolicy:
    """Return the policy of a group that has parameters."""
    policy: MixedPrecisionPolicy = group.fsdp_params[0].mp_policy
    return policy


def set_policy(group: Any, policy: MixedPrecisionPolicy) -> None:
    """Set the policy of a group before the first forward pass."""
    # FSDP reads the policy of the group, and since torch 2.15 that of each record
    group.mp_policy = policy
    for record in group.fsdp_params:
        record.mp_policy = policy


def has_run(unit: FSDPModule) -> bool:
    """Return True if a root unit has run, so that it has something to reset."""
    return unit._get_fsdp_state()._is_root is not None


def at_end_of_backward(unit: FSDPModule, wrapped: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
    """Replace FSDP's callback at the end of a backward pass by what `wrapped` makes of it. A pipeline calls it again
    after the last backward pass of a step; since torch 2.15 it calls `finalize_backward` there instead."""
    state: Any = unit._get_fsdp_state()
    state._root_post_backward_final_callback = wrapped(state._root_post_backward_final_callback)
    if (finalize := getattr(state, "finalize_backward", None)) is not None:
        state.finalize_backward = lambda **named: wrapped(functools.partial(finalize, **named))()


def run_fsdp_hook_first(unit: nn.Module) -> None:
    """Let FSDP's own hook run before the other hooks of a unit's forward: it sets everything up."""
    assert isinstance(unit, FSDPModule)
    hooks: Any = unit._forward_pre_hooks
    state: Any = unit._get_fsdp_state()
    hooks.move_to_end(state._pre_forward_hook_handle.id, last=False)


def collectives_of(group: Any) -> tuple[Any, Any]:
    """Return the collectives that gather the parameters of a group and sum their gradients."""
    return group._all_gather_comm, group._reduce_scatter_comm


def set_collectives(group: Any, gather: Any, scatter: Any) -> None:
    """Public: FSDPModule.set_custom_all_gather, which refuses a unit with several groups."""
    group._all_gather_comm, group._reduce_scatter_comm = gather, scatter


def replicas_of(group: Any) -> dist.ProcessGroup | None:
    """Return the process group of FSDP's all-reduce over replicas; None if it does none now."""
    replicas: dist.ProcessGroup | None = None
    if group._is_hsdp and group.all_reduce_grads:
        replicas = group._all_reduce_process_group
    return replicas


def mark_backward_done(group: Any) -> None:
    group._training_state = TrainingState.POST_BACKWARD


def forget_gather(group: Any) -> None:
    """Drop the gather of an interrupted step: FSDP would wait for it, in a group that may be broken."""
    group._all_gather_result = None


def gathered(record: Any) -> Any:
    """Return the whole parameter of a record; None if it was never gathered. Public: none; `unsharded_param` fails
    then."""
    return getattr(record, "_unsharded_param", None)


_SUMS_ARE_GRADIENTS = not hasattr(FSDPParam, "to_accumulated_grad_if_needed")
"""Where FSDP keeps sums over micro-batches, which have the dtype of the reduction. Since torch 2.15 they are the
gradient of the whole parameter; before, they are beside it if the parameter has another dtype."""


def keep_gradients_as_computed(group: Any) -> None:
    """Let each backward pass compute the gradient of a whole parameter in the parameter's dtype.

    Since torch 2.15 the first of several micro-batches would have it in the dtype of the reduction, and the others in
    that of the parameter. A hook of a task would see one or the other, depending on how many micro-batches its rank
    has; and one that returns the dtype of the parameter would be refused.
    """
    if not _SUMS_ARE_GRADIENTS:
        return

    def set_dtypes(defer_upcast: bool) -> None:
        """Called by FSDP when a backward pass begins, and with False when it ends."""
        for record in group.fsdp_params:
            whole = gathered(record)
            if whole is None or not whole.requires_grad or record.reduce_dtype is None:
                continue
            whole.grad_dtype = None  # any dtype
            if whole.grad is not None and not defer_upcast:
                whole.grad = whole.grad.to(record.reduce_dtype)

    group._set_unsharded_grad_dtypes = set_dtypes


def has_gradient(record: Any) -> bool:
    """Return True if the gathered parameter of a record has a gradient that is not yet summed over ranks."""
    has_sum = not _SUMS_ARE_GRADIENTS and record.unsharded_accumulated_grad is not None
    return has_sum or gathered(record).grad is not None


def equalise_gradients(records: Sequence[Any]) -> None:
    """Give all gradients of a group the dtype of the reduction. Before torch 2.15 FSDP refuses one of another dtype
    beside a sum over micro-batches: that of a parameter which only the last micro-batch has used, or none."""
    if _SUMS_ARE_GRADIENTS:
        return
    for record in records:
        if record.reduce_dtype is None or not gathered(record).requires_grad:
            continue
        if record.unsharded_accumulated_grad is not None:
            record.accumulate_unsharded_grad_if_needed()
        elif gathered(record).grad is not None:
            record.to_accumulated_grad_if_needed()
        elif gathered(record).dtype != record.reduce_dtype:
            record.unsharded_accumulated_grad = torch.zeros_like(gathered(record), dtype=record.reduce_dtype)


def forget_gradients(record: Any) -> None:
    """Drop the gradients of the whole parameter: the next backward pass would add to them, without an error."""
    if not _SUMS_ARE_GRADIENTS:
        record.unsharded_accumulated_grad = None
    if (whole := gathered(record)) is not None:
        whole.grad = None


def parameter_name(record: Any) -> str:
    return str(record._param_fqn)


def module_of(record: Any) -> tuple[nn.Module, str]:
    """Return the module of a parameter, and its attribute."""
    return record._module_info.module, record._module_info.param_name


def shard_memory(record: Any) -> Tensor:
    """Return the flat, padded shard that FSDP gathers from."""
    memory: Tensor = record._sharded_param_data
    return memory


def set_shard_memory(record: Any, flat: Tensor) -> None:
    record._sharded_param_data = flat


# --- Tensors, modules, autograd ---------------------------------------------------------------------------------------


def is_in_backward() -> bool:
    """Why: tells a forward pass from its recomputation. Without: recomputed blocks count twice. Public: none."""
    return bool(torch._C._current_graph_task_id() != -1)


def gradient_hooks(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Why: hooks of a parameter are moved to what FSDP puts in its place. Without: they never run. Public: none."""
    return tuple((parameter._backward_hooks or {}).values())


def forward_hooks(module: nn.Module) -> tuple[Any, ...]:
    """Why: a hook of the task may carry state in its closure. Without: it is not found. Public: none."""
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def has_hooks_after_accumulation(parameter: nn.Parameter) -> bool:
    """Why: to refuse a hook that would see the sum of one rank. Without: wrong results. Public: none."""
    return bool(parameter._post_accumulate_grad_hooks)


def sum_replicas(group: FSDPParamGroup, all_reduce: Callable[[Tensor, dist.ProcessGroup], None]) -> None:
    """Have `all_reduce` add up the gradients of shards over their replicas, in the place of FSDP's own all-reduce."""
    info: Any = group.mesh_info
    group.mesh_info = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)

    def add_up(shard: Tensor) -> None:
        if shard.is_cuda:  # FSDP keeps it for its own all-reduce only; it is memory of the reduce-scatter's stream
            shard.record_stream(torch.cuda.current_stream())
        all_reduce(shard, info.mesh.get_group(info.replicate_mesh_dim))

    group._all_reduce_hook = add_up


def is_profiling() -> bool:
    """Return whether torch's profiler is on."""
    return torch.autograd.profiler._is_profiler_enabled


def overlaps_itself(tensor: Tensor) -> bool:
    """Why: to refuse an expanded parameter by its name. Public: none; strides do not tell it in all cases."""
    return torch._debug_has_internal_overlap(tensor) == 1


def storage_id(tensor: Tensor) -> int:
    """Why: tensors of one memory, also if it has no address yet. Public: untyped_storage().data_ptr(), 0 for those."""
    return int(tensor.untyped_storage()._cdata)


def schema_of(operation: Any) -> Any:
    """Why: the name of an operation that a dispatch mode gets, and which arguments it writes. Public: none."""
    return operation._schema


def wrapper_tensor(cls: Any, shape: Any, *, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Any:
    """Why: a tensor that has a shape and no memory. Without: each rank holds the whole output of a head. Public: none;
    torch's documentation on extending names it."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)


def truncated_normal() -> Callable[..., Tensor]:
    """Why: a vision transformer has its weights from `trunc_normal_`, which would look like a read of each. Without:
    such a model is built whole on every rank. Public: none; torch has no hook for it."""
    draw: Callable[..., Tensor] = nn.init._no_grad_trunc_normal_
    return draw


def replace_truncated_normal(function: Callable[..., Tensor]) -> None:
    nn.init._no_grad_trunc_normal_ = function


def skip_side_effects_of_recomputation() -> None:
    """Why: without it a counter in a block that is compiled and recomputed is an error. Public: none."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def default_device() -> Any:
    """Why: whether the task has left another one. Public: torch.get_default_device, which also looks at the modes that
    are entered, and takes longer than all other settings together."""
    return _device.CURRENT_DEVICE


def enter_inference_mode(*, is_on: bool) -> Any:
    """Why: to undo that the task has left inference mode. It ends with what is returned. Public: the context manager,
    which cannot be entered without being left."""
    mode = torch._C._InferenceMode(is_on)
    mode.__enter__()  # type: ignore[no-untyped-call]
    return mode


def run_schedule(schedule: Any, inputs: Sequence[Any], keywords: Sequence[Any], targets: Any, losses: Any) -> None:
    """Why: Shoal cuts the batch into micro-batches itself, with weights of their own. Public: `step`, which cuts a
    batch into equal ones."""
    schedule._step_microbatches(inputs, keywords, targets, losses, return_outputs=False)
