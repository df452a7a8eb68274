"""The collectives of context parallelism: keys and values to all ranks, or heads against tokens, gradients included.

Plain torch.distributed calls, which end in `Work.wait` and can therefore be timed and left (see `waiting`); functional
collectives wait where nobody can wake them. The mesh is asked for its group in every call: a model may outlive its
generation, and then its mesh is put onto the next one's groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def all_to_all(parts: Tensor, mesh: DeviceMesh) -> Tensor:
    """Row i of `parts` (degree, ...) goes to rank i of the 1-D `mesh`; row i of the result came from rank i.

    Its backward is the same exchange of the gradients. All ranks of the mesh, with equal shapes.
    """
    out: Tensor = _AllToAll.apply(parts, mesh)  # type: ignore[no-untyped-call]
    return out


def all_gather(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Every rank's `part`: (...) -> (degree, ...). All ranks of the 1-D `mesh`, with equal shapes.

    Its backward gives each rank the sum of all ranks' gradients of its part, added up in fp32.
    """
    out: Tensor = _AllGather.apply(part, mesh)  # type: ignore[no-untyped-call]
    return out


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _exchanged(parts, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.mesh), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        whole = part.new_empty((mesh.size(), *part.shape))
        dist.all_gather_single(whole.flatten(0, 1), part.contiguous(), mesh.get_group())  # gloo wants them in a row
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # A reduce-scatter in two steps. gloo's own is an all-reduce of the whole, of twice the bytes; and this one adds
        # in the order of the ranks, in fp32, so bf16 loses nothing to the number of ranks.
        terms = _exchanged(gradients[0], ctx.mesh)
        if terms.dtype.itemsize < torch.float32.itemsize:
            return terms.sum(0, dtype=torch.float32).to(terms.dtype), None
        return terms.sum(0), None


def _exchanged(parts: Tensor, mesh: DeviceMesh) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=mesh.get_group())
    return received
