"""Gradient clipping by global L2 norm (Pascanu et al. 2013) on local shards, without a collective of its own.

The squared norms go through the step's vote; the result equals `torch.nn.utils.clip_grad_norm_` on the whole model.
Works on the local tensors, since DTensor's dispatch would cost more than the arithmetic on small models, and since the
parameters of one model may lie on different meshes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Gradients:
    """This rank's shard of every gradient that there is."""

    by_share: dict[float, list[Tensor]]
    """By their part of a squared norm: 1 / the number of ranks that hold the same values."""

    @staticmethod
    @torch.no_grad()
    def of(shares: Iterable[tuple[nn.Parameter, float]]) -> Gradients:
        by_share: dict[float, list[Tensor]] = defaultdict(list)
        for parameter, share in shares:
            gradient = parameter.grad
            if gradient is not None:
                by_share[share].append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        return Gradients(by_share)

    @torch.no_grad()
    def squared_norm(self, device: torch.device) -> Tensor:
        """Scalar float64: sum of squares of what counts here; over all ranks they add up to that of the model."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for share, gradients in self.by_share.items():
            held = [gradient for gradient in gradients if gradient.numel()]
            if held and share:
                norms = torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(held)])
                total += torch.dot(norms, norms) * share
        return total

    def clip(self, total_norm: float, max_norm: float) -> None:
        """Scale down in place, if `total_norm` is over `max_norm`."""
        self.scale(min(1.0, max_norm / (total_norm + _EPS)))

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        if factor != 1.0:
            for gradients in self.by_share.values():
                torch._foreach_mul_(gradients, factor)
