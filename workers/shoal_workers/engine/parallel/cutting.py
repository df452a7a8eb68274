"""One rank's part of a parameter that every rank has built whole, without communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def cut(parameter: nn.Parameter, cuts: Sequence[tuple[DeviceMesh, int]]) -> nn.Parameter:
    """A DTensor over the product of 1-D meshes, sharded along one dim over each."""
    part = parameter.detach()
    for mesh, dim in cuts:
        part = _part(part, dim, mesh)
    meshes = [mesh for mesh, _ in cuts]
    shard = DTensor.from_local(
        part.clone(memory_format=torch.contiguous_format),  # or the whole would stay in memory
        meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes),
        [Shard(dim) for _, dim in cuts],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(shard, requires_grad=parameter.requires_grad)


def local(parameter: Tensor) -> Tensor:
    """The local part, through which gradients flow."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """As DTensor cuts: like torch.chunk, and empty for ranks beyond the last chunk."""
    size = -(-tensor.shape[dim] // mesh.size())
    first = min(mesh.get_local_rank() * size, tensor.shape[dim])
    return tensor.narrow(dim, first, min(size, tensor.shape[dim] - first))
