"""Collectives that carry tokens to experts and answers back, with their gradients. Used by `experts` only.

                   forward                            backward
    exchange_rows  all-to-all with uneven splits      the same way back
    sum_in_parts   terms -> own part of their sum     own part's gradient -> every rank
    copy_in        -                                  all-reduce
    sum_out        all-reduce                         -

Plain torch.distributed calls: their waits can be timed and left, those of functional collectives cannot. Meshes are 1-D
and are asked for their group in every call, for a model may outlive the groups of its generation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh


def send_counts(counts: Tensor, mesh: DeviceMesh) -> Tensor:
    """Row i of `counts` (degree, ...) goes to rank i; row i of the result came from rank i. No gradient."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=mesh.get_group())
    return received


def gather_counts(counts: Tensor, mesh: DeviceMesh) -> Tensor:
    """Every rank's: (...) -> (degree, ...). No gradient."""
    whole = counts.new_empty(mesh.size() * counts.numel())  # flat: gloo does not see parts of it otherwise
    dist.all_gather_single(whole, counts.flatten(), group=mesh.get_group())
    return whole.view(mesh.size(), *counts.shape)


def exchange_rows(rows: Tensor, num_sent: list[int], num_received: list[int], mesh: DeviceMesh) -> Tensor:
    """The first num_sent[0] of `rows` (N, D) go to rank 0, and so on; what came from rank 0 is first in the result."""
    out: Tensor = _ExchangeRows.apply(rows, num_sent, num_received, mesh)  # type: ignore[no-untyped-call]
    return out


def sum_in_parts(terms: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's part along `dim`, which the degree must divide, of the sum of all ranks' `terms`; added up in fp32.

    The all-to-all half of a reduce-scatter: gloo's own is a whole all-reduce.
    """
    degree = mesh.size()
    parts = torch.stack(terms.chunk(degree, dim))
    even = [parts[0].shape[0]] * degree
    received = exchange_rows(parts.flatten(0, 1), even, even, mesh).view(parts.shape)
    return received.sum(0, dtype=torch.promote_types(terms.dtype, torch.float32)).to(terms.dtype)


def copy_in(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    out: Tensor = _CopyIn.apply(whole, mesh)  # type: ignore[no-untyped-call]
    return out


def sum_out(terms: Tensor, mesh: DeviceMesh) -> Tensor:
    out: Tensor = _SumOut.apply(terms, mesh)  # type: ignore[no-untyped-call]
    return out


class _ExchangeRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_sent: list[int], num_received: list[int], mesh: DeviceMesh) -> Tensor:
        ctx.num_sent, ctx.num_received, ctx.mesh = num_sent, num_received, mesh
        return _exchanged(rows, num_sent, num_received, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.num_received, ctx.num_sent, ctx.mesh), None, None, None


class _CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradients[0], ctx.mesh), None


class _SumOut(Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, mesh: DeviceMesh) -> Tensor:
        return _all_reduced(terms, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _exchanged(rows: Tensor, num_sent: list[int], num_received: list[int], mesh: DeviceMesh) -> Tensor:
    out = rows.new_empty((sum(num_received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), num_received, num_sent, group=mesh.get_group())
    return out


def _all_reduced(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=mesh.get_group())
    return total
