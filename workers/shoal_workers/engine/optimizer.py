"""The optimizer: AdamW from the spec, its state before the first step, and the learning rate of a step."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from shoal_workers.contract.spec import OptimizerSpec


def adamw(model: nn.Module, settings: OptimizerSpec) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019); weight decay on parameters of two or more dimensions only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=betas, eps=settings.eps, foreach=True)


def remember_peak_lr(optimizer: Optimizer) -> None:
    """Keep each group's own peak rate, which the schedule scales: a task may give its groups different rates."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Before an update: every group's peak rate times the schedule's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def materialise_state(optimizer: Optimizer) -> None:
    """Make the optimizer create its state now, so that a checkpoint has tensors to be read into.

    One step with zero gradients at rate zero. It may still change parameters of an unusual optimizer, and counts a
    step; so call it only right before everything is overwritten by a restore.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
