"""The optimizer that a spec names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import AdamW, Optimizer

from shoal_workers.contract.spec import OptimizerSpec


def adamw(parameters: Sequence[nn.Parameter], settings: OptimizerSpec) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019); weight decay on parameters of two or more dimensions only."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=betas, eps=settings.eps, foreach=True)
