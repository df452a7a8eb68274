"""Collectives inside forward and backward passes, in the pairs that tensor parallelism needs.

                  forward              backward
    gather_sum    all-gather           reduce-scatter      parts of a sequence -> whole; every rank uses it otherwise
    gather_same   all-gather           own part            ... every rank does the same with it
    sum_scatter   reduce-scatter       all-gather          partial sums -> parts of the sequence of the sum
    own_part      own part             all-gather          the other way of gather_same
    copy          -                    all-reduce          whole in, used otherwise on every rank
    total         all-reduce           -                   partial sums -> sum, whole on every rank

Plain collectives of torch.distributed, whose waits can be interrupted and timed (see waiting.py); those of DTensor can
not. All ranks of the group call them in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

Group = dist.ProcessGroup


def all_gather(part: Tensor, dim: int, group: Group) -> Tensor:
    """Equal parts of every rank, one after the other along `dim`."""
    rows = part.movedim(dim, 0).contiguous()
    whole = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    dist.all_gather_single(whole, rows, group=group)
    return whole.movedim(0, dim)


def reduce_scatter(whole: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    rows = whole.movedim(dim, 0).contiguous()
    if rows.device.type == "cpu":  # gloo's own is a whole all-reduce
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        part = received.view(group.size(), -1, *rows.shape[1:]).sum(0)
    else:
        part = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
        dist.reduce_scatter_single(part, rows, group=group)
    return part.movedim(0, dim)


def take_part(whole: Tensor, dim: int, group: Group) -> Tensor:
    length = whole.shape[dim] // group.size()
    return whole.narrow(dim, group.rank() * length, length)


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    summed = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


def gather_sum(part: Tensor, dim: int, group: Group) -> Tensor:
    return _GatherSum.apply(part, dim, group)  # type: ignore[no-untyped-call, no-any-return]


def gather_same(part: Tensor, dim: int, group: Group) -> Tensor:
    return _GatherSame.apply(part, dim, group)  # type: ignore[no-untyped-call, no-any-return]


def sum_scatter(partial: Tensor, dim: int, group: Group) -> Tensor:
    return _SumScatter.apply(partial, dim, group)  # type: ignore[no-untyped-call, no-any-return]


def own_part(whole: Tensor, dim: int, group: Group) -> Tensor:
    return _OwnPart.apply(whole, dim, group)  # type: ignore[no-untyped-call, no-any-return]


def copy(whole: Tensor, group: Group) -> Tensor:
    return _Copy.apply(whole, group)  # type: ignore[no-untyped-call, no-any-return]


def total(partial: Tensor, group: Group) -> Tensor:
    return _Total.apply(partial, group)  # type: ignore[no-untyped-call, no-any-return]


class _GatherSum(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(part, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce_scatter(gradient, ctx.dim, ctx.group), None, None


class _GatherSame(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(part, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return take_part(gradient, ctx.dim, ctx.group), None, None


class _SumScatter(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(partial, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gather(gradient, ctx.dim, ctx.group), None, None


class _OwnPart(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return take_part(whole, dim, group).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gather(gradient, ctx.dim, ctx.group), None, None


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_reduce(gradient, ctx.group), None


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        return all_reduce(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
