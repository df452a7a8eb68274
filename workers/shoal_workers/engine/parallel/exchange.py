"""Collectives inside forward and backward passes: every one that the tensor, expert and context axes need.

                   forward             backward
    gather_sum     all-gather          reduce-scatter      parts -> whole; every rank uses it otherwise
    gather_same    all-gather          own part            ... every rank does the same with it
    sum_scatter    reduce-scatter      all-gather          terms -> own part of their sum
    own_part       own part            all-gather          the other way of gather_same
    copy           -                   all-reduce          whole in, used otherwise on every rank
    total          all-reduce          -                   terms -> sum, whole on every rank
    exchange_rows  all-to-all          all-to-all back     rows to the ranks that they are for

All ranks of a 1-D mesh call them in the same order. The mesh is asked for its group in every call: a model may outlive
its generation, and then its mesh is put onto the next one's groups.

Plain collectives of torch.distributed, whose waits can be timed and left (see `waiting`); those of DTensor and
functional ones can not. For the same reason none of them becomes part of a compiled graph.
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
    """Equal parts of every rank, one after the other along `dim`; gradients are added up in fp32."""
    return _pair(part, partial(_gathered, dim=dim, mesh=mesh), partial(_sum_scattered, dim=dim, mesh=mesh))


def gather_same(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """As `gather_sum`, where all ranks then compute the same from it."""
    return _pair(part, partial(_gathered, dim=dim, mesh=mesh), partial(_taken, dim=dim, mesh=mesh))


def sum_scatter(terms: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's part along `dim`, which the degree must divide, of the sum of all ranks' terms, made in fp32."""
    return _pair(terms, partial(_sum_scattered, dim=dim, mesh=mesh), partial(_gathered, dim=dim, mesh=mesh))


def own_part(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's part along `dim`, of its own."""
    return _pair(whole, partial(_taken, dim=dim, mesh=mesh), partial(_gathered, dim=dim, mesh=mesh))


def copy(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same; the ranks' gradients are added up."""
    return _pair(whole, _same, partial(_all_reduced, mesh=mesh))


def total(terms: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all ranks' terms, on every rank."""
    return _pair(terms, partial(_all_reduced, mesh=mesh), _same)


def exchange_rows(rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """The first num_sent[0] of `rows` (N, ...) go to rank 0, and so on; what came from rank 0 comes first in return."""
    there = partial(_exchanged, num_sent=num_sent, num_received=num_received, mesh=mesh)
    back = partial(_exchanged, num_sent=num_received, num_received=num_sent, mesh=mesh)
    return _pair(rows, there, back)


def swap(parts: Tensor, mesh: DeviceMesh) -> Tensor:
    """Row i of `parts` (degree, ...) goes to rank i; row i of the result came from rank i."""
    one_each = [1] * mesh.size()
    return exchange_rows(parts, one_each, one_each, mesh)


def _pair(tensor: Tensor, there: Step, back: Step) -> Tensor:
    return _apply(tensor, there, back)


class _Pair(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Step, back: Step) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


_apply: Callable[..., Tensor] = torch.compiler.disable(_Pair.apply)  # type: ignore[no-untyped-call]


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _gathered(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    rows = part.movedim(dim, 0).contiguous()
    whole = rows.new_empty(mesh.size() * rows.shape[0], *rows.shape[1:])
    dist.all_gather_single(whole, rows, group=mesh.get_group())
    return whole.movedim(0, dim)


def _sum_scattered(terms: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """In two steps: gloo's own is a whole all-reduce, and NCCL's adds in the terms' dtype."""
    rows = terms.movedim(dim, 0).contiguous()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=mesh.get_group())
    by_rank = received.view(mesh.size(), -1, *rows.shape[1:])
    summed = by_rank.sum(0, dtype=torch.promote_types(terms.dtype, torch.float32)).to(terms.dtype)
    return summed.movedim(0, dim)


def _taken(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    length = whole.shape[dim] // mesh.size()
    return whole.narrow(dim, mesh.get_local_rank() * length, length).clone()


def _all_reduced(terms: Tensor, mesh: DeviceMesh) -> Tensor:
    summed = terms.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=mesh.get_group())
    return summed


def _exchanged(rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], mesh: DeviceMesh) -> Tensor:
    out = rows.new_empty((sum(num_received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), list(num_received), list(num_sent), group=mesh.get_group())
    return out
