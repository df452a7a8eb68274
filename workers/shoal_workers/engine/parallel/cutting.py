"""Conversions between whole parameters, local parts and DTensors, without communication.

Called when a model is built (`cut`), in forward passes (`local`), for gradients and optimizer state (`shard_like`), and
once per worker (`replace_detach`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal_workers.torch_internals import (
    TorchDispatchMode,
    concatenate,
    local_of,
    replace_dtensor_operation,
    spec_of,
)


def cut(parameter: nn.Parameter, cuts: Sequence[tuple[DeviceMesh, int]]) -> nn.Parameter:
    """Returns this rank's part of a parameter that every rank has built whole.

    A DTensor over the product of 1-D meshes, sharded along one dim over each."""
    part = parameter.detach()
    for mesh, dim in cuts:
        part = _part(part, dim, mesh)
    meshes = [mesh for mesh, _ in cuts]
    shard = DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),  # a view would keep the whole parameter in memory
        meshes[0] if len(meshes) == 1 else concatenate(meshes),
        [Shard(dim) for _, dim in cuts],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return take_attributes(nn.Parameter(shard, requires_grad=parameter.requires_grad), parameter)


def user_attributes(parameter: Tensor) -> dict[str, Any]:
    """What the model's code has set on a parameter, for example `lr_scale`."""
    return {name: value for name, value in vars(parameter).items() if name != "_is_param"}


def take_attributes(fresh: nn.Parameter, parameter: Tensor) -> nn.Parameter:
    """Returns `fresh`, which replaces the parameter, with the attributes that the model's code has set."""
    vars(fresh).update(user_attributes(parameter))
    return fresh


def shard_like(owner: DTensor, local_part: Tensor) -> DTensor:
    """`local_part` as this rank's shard of a tensor that is laid out as `owner` is; shares its memory, which may be the
    host's."""
    # `from_local` computes the layout for each tensor again, and moves it to the device
    if local_part.dtype == owner.dtype or local_part.device != owner.device:
        return DTensor(local_part.detach(), spec_of(owner), requires_grad=False)  # type: ignore[no-untyped-call]
    return DTensor.from_local(
        local_part, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
    )


def replace_detach() -> None:
    """DTensors are detached without planning: torch plans each operation once for every mesh and shape, with tensors
    without memory, and a group that has lost a rank has other meshes and shapes. Building and restoring a model detach
    all of its parameters and of the optimizer's state, and need little else of DTensor. Idempotent."""
    replace_dtensor_operation(torch.ops.aten.detach.default, _detached)


def _detached(op_call: object, args: tuple[Any, ...], kwargs: dict[str, object]) -> DTensor:
    (tensor,) = args
    return DTensor(local_of(tensor).detach(), spec_of(tensor), requires_grad=False)  # type: ignore[no-untyped-call]


class WholeNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A number that code reads of a DTensor is that of the whole one; torch gives this rank's part of a sum, as of
    `float(gradient.square().sum())`. All ranks read it alike."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor):
            args = (args[0].full_tensor(),)
        return func(*args, **(kwargs or {}))


def local(parameter: Tensor) -> Tensor:
    """The local part; gradients flow through it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Splits as DTensor does: like torch.chunk, and empty for ranks beyond the last chunk."""
    size = -(-tensor.shape[dim] // mesh.size())
    first = min(mesh.get_local_rank() * size, tensor.shape[dim])
    return tensor.narrow(dim, first, min(size, tensor.shape[dim] - first))
