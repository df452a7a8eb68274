"""Collectives inside forward and backward passes: all that the tensor, expert and context axes need.

                   forward             backward
    gather_sum     all-gather          reduce-scatter      parts -> whole; every rank uses the whole differently
    gather_same    all-gather          own part            parts -> whole; every rank uses the whole in the same way
    sum_scatter    reduce-scatter      all-gather          summands -> own part of their sum
    own_part       own part            all-gather          inverse of gather_same
    copy           -                   all-reduce          whole -> whole; every rank uses it differently
    total          all-reduce          -                   summands -> sum, whole on every rank
    exchange_rows  all-to-all          all-to-all back     rows -> the ranks that they are for

All ranks of a 1-D mesh call them in the same order. Every call looks up the mesh's group again: a model may outlive its
generation, and then its mesh refers to the groups of the next one.

These are plain collectives of torch.distributed, whose waits can be timed and left (see group/collectives.py);
those of DTensor and functional collectives cannot. For the same reason none of them becomes part of a compiled graph.
Called by what the tensor, expert and context axes install in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh

Step = Callable[[Tensor], Tensor]


def gather_sum(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Equal parts of all ranks, concatenated along `dim`; gradients are summed in fp32."""
    return _pair(part, partial(_gather, dim=dim, mesh=mesh), partial(_scatter_sums, dim=dim, mesh=mesh))


def gather_same(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Gathers as `gather_sum` does, for a result from which all ranks compute the same."""
    return _pair(part, partial(_gather, dim=dim, mesh=mesh), partial(_take_part, dim=dim, mesh=mesh))


def sum_scatter(summands: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's part along `dim`, which the degree must divide, of the sum over all ranks, computed in
    fp32."""
    return _pair(summands, partial(_scatter_sums, dim=dim, mesh=mesh), partial(_gather, dim=dim, mesh=mesh))


def own_part(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's part along `dim` of a tensor that is the same on all ranks."""
    return _pair(whole, partial(_take_part, dim=dim, mesh=mesh), partial(_gather, dim=dim, mesh=mesh))


def copy(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the same tensor; the ranks' gradients are summed."""
    return _pair(whole, _same, partial(_all_reduce, mesh=mesh))


def total(summands: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over all ranks, on every rank."""
    return _pair(summands, partial(_all_reduce, mesh=mesh), _same)


def exchange_rows(rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """The first num_sent[0] of `rows` (N, ...) go to rank 0, and so on. The result begins with the rows from rank 0."""
    there = partial(_exchange, num_sent=num_sent, num_received=num_received, mesh=mesh)
    back = partial(_exchange, num_sent=num_received, num_received=num_sent, mesh=mesh)
    return _pair(rows, there, back)


def swap(parts: Tensor, mesh: DeviceMesh) -> Tensor:
    """Row i of `parts` (degree, ...) goes to rank i; row i of the result came from rank i."""
    one_each = [1] * mesh.size()
    return exchange_rows(parts, one_each, one_each, mesh)


class _Pair(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Step, back: Step) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


_pair: Callable[..., Tensor] = torch.compiler.disable(_Pair.apply)  # type: ignore[no-untyped-call]


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _gather(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    rows = part.movedim(dim, 0).contiguous()
    whole = rows.new_empty(mesh.size() * rows.shape[0], *rows.shape[1:])
    dist.all_gather_single(whole, rows, group=mesh.get_group())
    return whole.movedim(0, dim)


def _scatter_sums(summands: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """Sums in two steps: gloo's reduce-scatter is a whole all-reduce, and NCCL's adds in the dtype of the summands."""
    rows = summands.movedim(dim, 0).contiguous()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=mesh.get_group())
    by_rank = received.view(mesh.size(), -1, *rows.shape[1:])
    summed = by_rank.sum(0, dtype=torch.promote_types(summands.dtype, torch.float32)).to(summands.dtype)
    return summed.movedim(0, dim)


def _take_part(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    length = whole.shape[dim] // mesh.size()
    return whole.narrow(dim, mesh.get_local_rank() * length, length).clone()


def _all_reduce(summands: Tensor, mesh: DeviceMesh) -> Tensor:
    summed = summands.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=mesh.get_group())
    return summed


def _exchange(rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], mesh: DeviceMesh) -> Tensor:
    out = rows.new_empty((sum(num_received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(num_received), list(num_sent), group=mesh.get_group())
    return out
