"""Gradients of which several ranks hold one summand each: summed once per step, after the last micro-batch.

    tensor axis      norms on parts of a sequence, routers of split experts: all-reduce over tp, in one flat buffer
    pipeline's ends  a weight tied across stages: first and last rank exchange their sums

Both happen after FSDP has reduced the gradients, on this rank's shards: sums over different axes commute. Called by the
gradient pass on the training thread of every rank, once the backward passes have left their gradients in `grad`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.cutting import local


class PartialGradients:
    """Sums the partial gradients of one generation."""

    def __init__(self, assembly: Assembly, meshes: Meshes) -> None:
        self._partial = [getattr(module, name) for module, name in assembly.partial]
        self._tp = meshes.tp.get_group() if meshes.tp is not None else None
        self._pp = meshes.pp.get_group() if meshes.pp is not None else None
        self._tied = list(assembly.tied_end())
        self._tied_copies = list(assembly.tied_copies())
        self._is_first = assembly.is_first

    @torch.no_grad()
    def add_up(self) -> None:
        """All ranks, once per step."""

        if self._tp is not None:
            self._over_tp(self._tp)
        for parameter, tied_copy in self._tied_copies:
            summed = _gradient(parameter) + _gradient(tied_copy)
            _gradient(parameter).copy_(summed)
            _gradient(tied_copy).copy_(summed)
        if self._pp is not None and self._tied:
            self._across_ends(self._pp)

    def _over_tp(self, group: dist.ProcessGroup) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parameter in self._partial:
            if parameter.grad is not None:
                by_dtype[parameter.grad.dtype].append(_gradient(parameter))
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=group)
            _spread(flat, gradients)

    def _across_ends(self, group: dist.ProcessGroup) -> None:
        own = torch.cat([_gradient(parameter).reshape(-1) for parameter in self._tied])
        others = torch.empty_like(own)
        peer = dist.get_global_rank(group, group.size() - 1 if self._is_first else 0)
        exchange = [dist.P2POp(dist.isend, own, peer, group), dist.P2POp(dist.irecv, others, peer, group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        # in the same order on both sides, so that the two copies keep the same bits
        flat = own + others if self._is_first else others + own
        _spread(flat, [_gradient(parameter) for parameter in self._tied])


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None, "every stage's backward pass reaches its tied weights"
    return local(gradient)


def _spread(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
