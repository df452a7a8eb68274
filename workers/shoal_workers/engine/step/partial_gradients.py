"""Gradients of which several ranks hold one summand each: summed once per step, after the last micro-batch.

    tensor axis      norms on parts of a sequence, routers of split experts: all-reduce over tp, in one flat buffer
    stages           a parameter that several stages of a pipeline have: the ranks that have it exchange their summands

Both happen after FSDP has reduced the gradients, on this rank's shards: sums over different axes commute. Called by the
gradient pass on the training thread of every rank, once the backward passes have left their gradients in `grad`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.parallel.assembly import Assembly, SharedParameter
from shoal_workers.engine.parallel.cutting import local


class PartialGradients:
    """Sums the partial gradients of one generation."""

    def __init__(self, assembly: Assembly, meshes: Meshes) -> None:
        self._partial = [getattr(module, name) for module, name in assembly.partial]
        self._tp = meshes.tp.get_group() if meshes.tp is not None else None
        self._pp = meshes.pp.get_group() if meshes.pp is not None else None
        self._shared = _groups(assembly.shared_copies())

    @torch.no_grad()
    def add_up(self) -> None:
        """All ranks, once per step."""

        if self._tp is not None:
            self._over_tp(self._tp)
        if self._pp is not None and self._shared:
            self._over_stages(self._pp)

    def _over_tp(self, group: dist.ProcessGroup) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parameter in self._partial:
            if parameter.grad is not None:
                by_dtype[parameter.grad.dtype].append(_gradient(parameter))
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=group)
            _spread(flat, gradients)

    def _over_stages(self, group: dist.ProcessGroup) -> None:
        """Every rank adds the same summands in the same order, so that all copies keep the same bits."""
        own = [_flat(shared.parameters) for shared in self._shared]
        found = [
            [flat if rank == group.rank() else torch.empty_like(flat) for rank in shared.ranks]
            for shared, flat in zip(self._shared, own, strict=True)
        ]
        exchange = []
        for shared, summands in zip(self._shared, found, strict=True):
            for rank, summand in zip(shared.ranks, summands, strict=True):
                if rank != group.rank():
                    peer = dist.get_global_rank(group, rank)
                    exchange.append(dist.P2POp(dist.isend, summands[shared.ranks.index(group.rank())], peer, group))
                    exchange.append(dist.P2POp(dist.irecv, summand, peer, group))
        if exchange:
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
        for shared, summands in zip(self._shared, found, strict=True):
            flat = summands[0]
            for summand in summands[1:]:
                flat = flat + summand
            _spread_to_copies(flat, shared.parameters)


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters of one dtype that the same pipeline ranks have."""

    ranks: tuple[int, ...]
    parameters: tuple[SharedParameter, ...]


def _groups(shared: Sequence[SharedParameter]) -> list[_Group]:
    """In an order that all their ranks agree on."""
    groups: dict[tuple[tuple[int, ...], str], list[SharedParameter]] = defaultdict(list)
    for one in shared:
        groups[one.ranks, str(one.copies[0].dtype)].append(one)
    return [_Group(ranks, tuple(parameters)) for (ranks, _), parameters in sorted(groups.items(), key=lambda i: i[0])]


def _flat(parameters: Sequence[SharedParameter]) -> Tensor:
    """This rank's summand of every gradient, then for each parameter 1 if it has any: a parameter that no stage has
    used keeps no gradient."""
    pieces: list[Tensor] = []
    is_there: list[float] = []
    for shared in parameters:
        present = [_gradient(parameter) for parameter in shared.copies if parameter.grad is not None]
        summand = present[0] if present else torch.zeros_like(local(shared.copies[0]))
        for gradient in present[1:]:
            summand = summand + gradient
        pieces.append(summand.reshape(-1))
        is_there.append(1.0 if present else 0.0)
    return torch.cat([*pieces, pieces[0].new_tensor(is_there)])


def _spread_to_copies(flat: Tensor, parameters: Sequence[SharedParameter]) -> None:
    *pieces, is_there = torch.split(flat, [*(local(one.copies[0]).numel() for one in parameters), len(parameters)])
    for shared, piece, count in zip(parameters, pieces, is_there.tolist(), strict=True):
        for parameter in shared.copies if count else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = _gradient(parameter)
            gradient.copy_(piece.view_as(gradient))


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return local(gradient)


def _spread(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
