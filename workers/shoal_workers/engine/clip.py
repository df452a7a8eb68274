"""Gradient clipping by global L2 norm (Pascanu et al. 2013) on local shards, without a collective of its own.

The squared norms go through the step's vote; the result equals `torch.nn.utils.clip_grad_norm_` on the whole model.
Works on the local tensors, since DTensor's dispatch would cost more than the arithmetic on small models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_EPS = 1e-6


@torch.no_grad()
def local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """This rank's shard of every gradient that there is."""
    gradients = (parameter.grad for parameter in parameters)
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients if g is not None]


@torch.no_grad()
def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Scalar float64: sum of squares over this rank's shards."""
    held = [gradient for gradient in gradients if gradient.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(held)])
    return torch.dot(norms, norms)


@torch.no_grad()
def clip(gradients: Sequence[Tensor], total_norm: float, max_norm: float) -> None:
    """Scale the gradients down in place, if `total_norm` is over `max_norm`."""
    factor = max_norm / (total_norm + _EPS)
    if factor < 1.0:
        torch._foreach_mul_(list(gradients), factor)
