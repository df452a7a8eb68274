"""Gradient clipping by global L2 norm (Pascanu et al. 2013) on local shards, without a collective of its own.

The squared norms are summed in the step's vote; the result equals `torch.nn.utils.clip_grad_norm_` on the whole model.
Works on local tensors, because DTensor's dispatch would cost more than the arithmetic on small models, and because the
parameters of one model may be on different meshes. Called by the trainer and by `GradientPass`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal_workers.engine.parallel.cutting import local

_EPS = 1e-6
_HALF = (torch.bfloat16, torch.float16)


def clip_factor(total_norm: float, max_norm: float | None) -> float:
    """What all gradients are multiplied by: below 1 if `total_norm` is above `max_norm`. None: they are not clipped."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (total_norm + _EPS))


@dataclass(frozen=True, slots=True)
class Gradients:
    """This rank's shards of all gradients that exist."""

    by_share: dict[float, list[Tensor]]
    """By their share of a squared norm: 1 / the number of ranks that hold the same values."""

    @staticmethod
    @torch.no_grad()
    def of(shares: Iterable[tuple[nn.Parameter, float]]) -> Gradients:
        by_share: dict[float, list[Tensor]] = defaultdict(list)
        for parameter, share in shares:
            gradient = parameter.grad
            if gradient is not None:
                by_share[share].append(local(gradient))
        return Gradients(by_share)

    @torch.no_grad()
    def squared_norm(self, device: torch.device) -> Tensor:
        """Scalar float64: this rank's share of the sum of squares; the shares of all ranks add up to the model's."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for share, gradients in self.by_share.items():
            present = [gradient for gradient in gradients if gradient.numel()]
            if present and share:
                norms = torch.stack([norm.to(torch.float64) for norm in _norms(present)])
                total += torch.dot(norms, norms) * share
        return total

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        if factor != 1.0:
            for gradients in self.by_share.values():
                torch._foreach_mul_(gradients, factor)


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """L2 norm of each; of complex ones, of their absolute values. Not in half precision: each shard's norm would be
    rounded to 8 or 11 bits, and the factor of all gradients would depend on how they are divided."""
    if not any(gradient.dtype in _HALF for gradient in gradients):
        return list(torch._foreach_norm(gradients))
    return [
        torch.linalg.vector_norm(gradient, dtype=torch.float32 if gradient.dtype in _HALF else None)
        for gradient in gradients
    ]
