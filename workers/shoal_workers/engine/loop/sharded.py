"""Shards the models of a loop over the ranks with FSDP2, and handles their gradients and their state.

    parameters   DTensors over `run.mesh`, split along one dim of the tensor; FSDP2 gathers a unit before it runs
    gradients    FSDP2 sums them over all ranks and micro-batches. It does not divide by the number of ranks, its
                 default: the loop divides by the weight of the global batch, once, before the update
    norm         each rank adds up the squares of its local shard, and the vote sums them over the ranks
    state        a DTensor is restored with the same placements over the mesh of this generation, whatever the number
                 of ranks that saved it. Optimizer state is split as its parameter

The spec (`parallelism`) decides the layout of the mesh. Training thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, empty
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from shoal_workers.checkpoint.load_plan import Shape
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.layout import Layout, ParallelismSpec, ShardLevel
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.group.gradient_buckets import sum_squares
from shoal_workers.engine.parallel.sharding import (
    default_shard_units,
    move_additions,
    places_of,
    sum_gradients,
)

_WAY_OUT = (
    "A loop has one mesh: wrap with run.wrap(model), or with fully_shard(module, mesh=run.mesh), and set parallelism: "
    "{dp_shard: auto} in the spec. A model that needs tensor parallelism trains as a task (docs/tasks.md), or as a "
    "script."
)


def wrapped(
    model: nn.Module, spec: JobSpec, layout: Layout, mesh: DeviceMesh, blocks: Iterable[nn.Module] | None
) -> nn.Module:
    """Shard a model over `mesh`, in place, if `spec.parallelism` fixes degrees now or did so when the worker started.

    Args:
        blocks: modules whose parameters are gathered together. None means the children of each ModuleList, and those
            of each Sequential that consist of modules.

    Raises:
        ValueError: a block is not inside the model.
    """
    if not isinstance(spec.parallelism, ParallelismSpec) and layout.dp_shard == 1:
        return model
    # None is torch's choice: it reshards all but the parameters of the root, which the backward pass needs first
    reshard = None if layout.shard is ShardLevel.FULL else False
    units = set(default_shard_units(model) if blocks is None else blocks) - {model}
    if unknown := units - set(model.modules()):
        names = ", ".join(sorted(type(module).__name__ for module in unknown))
        raise ValueError(
            f"run.wrap(blocks=...): {names} is no module of the model. Give modules that are inside of it."
        )
    additions = places_of((), model)
    for module in reversed(list(model.modules())):  # inner blocks first
        if module in units:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    move_additions(additions, model)
    return model


def begin_sums(modules: Iterable[nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Let FSDP2 sum the gradients of the tracked modules, instead of averaging them, also if the user has wrapped them.

    Raises:
        TypeError: an optimizer has sharded parameters of a module that is not tracked.
    """
    tracked: set[int] = set()
    for module in modules:
        sum_gradients(module)
        tracked |= {id(parameter) for parameter in module.parameters()}
    for name, optimizer in optimizers.items():
        if any(id(parameter) not in tracked for parameter in sharded_parameters(optimizer)):
            raise TypeError(
                f"run.track(): {name} has sharded parameters of a module that is not tracked, so nothing tells how "
                "their gradients are summed. Track the module too, and make the optimizer after it is wrapped."
            )


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if any of the tensors is a DTensor."""
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def sharded_parameters(optimizer: Optimizer) -> list[DTensor]:
    return [
        parameter for group in optimizer.param_groups for parameter in group["params"] if isinstance(parameter, DTensor)
    ]


def plain_parameters(optimizer: Optimizer, order: Mapping[int, int] | None = None) -> list[Tensor]:
    """Return the parameters that are not sharded.

    Args:
        order: numbers of parameters by their id, equal on all ranks; the others follow. None means the order of the
            optimizer, which another rank may not have if it was made of a set.
    """
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not isinstance(parameter, DTensor)
    ]
    return sorted(parameters, key=lambda one: order.get(id(one), len(order))) if order else parameters


class ShardedGradients:
    """Local shards of the gradients of an optimizer, which FSDP2 has summed."""

    def __init__(self, optimizer: Optimizer, num_replicas: int) -> None:
        """`num_replicas`: number of ranks with the same shards."""
        gradients = (parameter.grad for parameter in sharded_parameters(optimizer) if parameter.grad is not None)
        self.parts = [local_tensor(gradient) for gradient in gradients]
        self._num_replicas = num_replicas

    def squares(self, device: torch.device) -> Tensor:
        """Return this rank's summand of the squared norm: the sum over all ranks is the squared norm."""
        return sum_squares(self.parts, device) / self._num_replicas

    @torch.no_grad()
    def divide(self, weight: float) -> None:
        if self.parts:
            torch._foreach_div_(self.parts, weight)


def split_dim(tensor: DTensor, path: str, mesh: DeviceMesh | None) -> int | None:
    """Return the dim along which a tensor is split over `mesh`; None if it is whole on every rank.

    Raises:
        TypeError: the tensor is on another mesh, or has placements that a loop does not support.
    """
    if mesh is None or tensor.device_mesh != mesh:
        raise TypeError(
            f"run.track(): {path} is a DTensor over {tensor.device_mesh}, and what is tracked is over run.mesh, "
            f"{mesh}. {_WAY_OUT}"
        )
    *outer, last = tensor.placements
    is_supported = all(isinstance(placement, Replicate) for placement in outer) and type(last) in (Shard, Replicate)
    if not is_supported:
        raise TypeError(f"run.track(): {path} is a DTensor with the placements {tensor.placements}. {_WAY_OUT}")
    return last.dim if isinstance(last, Shard) else None


def allocate(
    shapes: Mapping[str, Shape],
    live: Mapping[str, Tensor],
    dims: Mapping[str, int],
    owners: Mapping[str, Tensor],
    mesh: DeviceMesh | None,
) -> dict[str, Tensor]:
    """Return uninitialised memory for the tensors of a saved state, by path: a DTensor of this rank's shard if it is
    split, else a whole tensor.

    Args:
        live: present tensors of the objects, by path.
        dims: dims along which tensors were split when they were saved, by path.
        owners: parameter to which optimizer state belongs, by the path without its last part.
    """
    is_split = is_sharded(live)

    def find_placements(path: str, shape: Shape) -> tuple[Placement, ...] | None:
        if path in live:
            tensor = live[path]
            return tensor.placements if isinstance(tensor, DTensor) else None
        owner = owners.get(path.rpartition("/")[0])
        if isinstance(owner, DTensor) and tuple(owner.shape) == shape.sizes:
            return owner.placements
        if path in dims and mesh is not None and is_split:
            return (*[Replicate()] * (mesh.ndim - 1), Shard(dims[path]))
        return None

    memory: dict[str, Tensor] = {}
    for path, shape in shapes.items():
        if (placements := find_placements(path, shape)) is None:
            memory[path] = torch.empty(shape.sizes, dtype=shape.dtype)
        else:
            memory[path] = empty(*shape.sizes, dtype=shape.dtype, device_mesh=mesh, placements=placements)
    return memory
