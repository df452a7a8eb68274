"""What a training loop calls to keep experts equally busy. It passes the model only, which may have no experts.

    once per step, first      forget_load     an aborted step may have left counts each micro-batch, first
    share_of_step   its share of the step's loss; 0 for a padding micro-batch once per step             sum_load
    every rank's counts become the sum over ranks; communicates, decides nothing after the optimizer       move_biases
    only if the optimizer stepped; communicates nothing, so it cannot fail

`balance_experts` is the last two in one, for a loop without a vote in between. Called by the passes and by
GradientPass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal_workers.tasks.router import Router


def balance_experts(model: nn.Module, all_reduce: Callable[[Tensor], object]) -> None:
    """`sum_load`, then `move_biases`."""
    sum_load(model, all_reduce)
    move_biases(model)


def forget_load(model: nn.Module) -> None:
    """Set all counts to zero."""

    for router in _counting_routers(model):
        router.expert_load.zero_()


def share_of_step(model: nn.Module, share: float) -> None:
    """Before a micro-batch's forward pass: its loss will be multiplied by `share`, loss scaling included."""
    for router in _routers(model):
        router.is_counting = share != 0
        router.loss_scale = share


def sum_load(model: nn.Module, all_reduce: Callable[[Tensor], object]) -> None:
    """Sum the counts over ranks: one all-reduce for all layers, none for a model that counts nothing.

    `all_reduce` sums an int64 tensor in place over every rank that has the same blocks: all but those along pp. Ranks
    along tp count the same tokens, which has no effect, because only the order of loads matters.
    """
    loads = [router.expert_load for router in _counting_routers(model)]
    if not loads:
        return
    flat = torch.cat(loads)
    all_reduce(flat)
    for load, total in zip(loads, torch.split(flat, [load.numel() for load in loads]), strict=True):
        load.copy_(total)


def move_biases(model: nn.Module) -> None:
    """Move every bias one step towards an even load, and set the counts to zero. Integer arithmetic up to the sign."""
    for router in _counting_routers(model):
        load = router.expert_load
        below_the_mean = (load.sum() - load * load.numel()).sign()
        router.expert_bias.add_(below_the_mean.to(router.expert_bias.dtype), alpha=router.balance_rate)
        load.zero_()


def _counting_routers(model: nn.Module) -> list[Router]:
    return [router for router in _routers(model) if router.balance == "bias"]


def _routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]
