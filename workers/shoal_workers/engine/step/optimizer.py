"""The optimizer that a spec names. Called by `default_update`.

`fused` and `foreach` are two implementations of the same arithmetic that round differently. The settings and the
parameters' device decide which one is used, so it is not part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import AdamW, Optimizer

from shoal_workers.contract.spec import OptimizerSpec
from shoal_workers.engine.step.double_buffered_adamw import DoubleBufferedAdamW


def adamw(parameters: Sequence[nn.Parameter], settings: OptimizerSpec, *, deterministic: bool = False) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019); weight decay on parameters of two or more dimensions only.

    Args:
        deterministic: never fused.
    """
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    fused = settings.fused
    if fused == "auto":
        fused = not deterministic and all(parameter.is_cuda for parameter in parameters)
    kind = DoubleBufferedAdamW if not fused and all(parameter.is_cpu for parameter in parameters) else AdamW
    return kind(
        groups,  # both, also without parameters: every stage of a pipeline has the same groups, perhaps all frozen
        lr=settings.lr,
        betas=betas,
        eps=settings.eps,
        foreach=not fused,
        fused=fused,
    )
