"""Chooses the experts of each token, and keeps the counts that keep experts equally busy.

Two ways of balancing, chosen by `model.balance`:

    bias    a bias on the choice, not on the weights, moves by a fixed step after every optimizer step, up for experts
            with less than the mean load, down for the others (Wang et al. 2024; DeepSeek-AI 2024, section 2.1.2).
            Scores are sigmoids. Loads are counts, so the bias is the same bits in every layout.
    loss    num_experts x sum of (share of the choices x mean probability) (Fedus et al. 2022), over one micro-batch.
            Scores are a softmax. The loss is not part of the task's: its gradient is added in the backward pass.

Both are done in the backward pass, which runs exactly once for every micro-batch: a forward pass may run twice
(activation recomputation) or without gradients (validation, replay). `balance` contains what a training loop must call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.model.lm import LanguageModelConfig

_BIAS_STEP, _LOSS_WEIGHT = 1e-3, 1e-2


class Choices(NamedTuple):
    """The k experts of each of N tokens."""

    experts: Tensor
    """(N, k) int64."""
    weights: Tensor
    """(N, k), fp32. A token's weights add up to one. With k = 1 the weight is the score: it would have no gradient
    else."""
    is_admitted: Tensor | None
    """(N, k) bool: within the capacity of the expert. None: all are admitted."""


class Router(nn.Module):
    """Tokens (..., T, D) -> the choices of all of them, in order."""

    expert_bias: Tensor
    """(E,) fp32, state: added to the scores for the choice. Only with balance "bias"."""
    expert_load: Tensor
    """(E,) int64, no state: choices of the micro-batches since the last step. Only with balance "bias"."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.top_k = config.top_k
        self.balance = config.balance
        default = _BIAS_STEP if config.balance == "bias" else _LOSS_WEIGHT
        self.balance_rate = default if config.balance_rate is None else config.balance_rate
        self.capacity_factor = config.capacity_factor
        self.token_counts = TokenCounts(config.num_experts)
        self.is_counting = True
        """False while a padding micro-batch runs."""
        self.loss_scale = 1.0
        """Factor of the micro-batch's loss before its backward pass; the balance loss has the same."""
        self.num_copies = 1
        """Number of ranks that route the same tokens and whose gradients are summed (tensor parallelism)."""
        if config.balance == "bias":
            self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))
            # On the CPU even under torch.device("meta"): no checkpoint contains it, so no restore would fill it.
            load = torch.zeros(config.num_experts, dtype=torch.int64, device="cpu")
            self.register_buffer("expert_load", load, persistent=False)

    def forward(self, x: Tensor) -> Choices:
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = logits.sigmoid() if self.balance == "bias" else logits.softmax(-1)
        preferred = scores.detach() + self.expert_bias if self.balance == "bias" else scores.detach()
        experts = preferred.topk(self.top_k).indices
        weights = scores.gather(-1, experts)
        if self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        load, is_admitted = None, None
        if self.capacity_factor is not None or self.balance == "loss":
            load, positions = self.token_counts(experts)
            if self.capacity_factor is not None:
                capacity = (load.sum().double() * self.capacity_factor / len(load)).ceil()
                is_admitted = (positions < capacity).flatten(0, -2)
        if torch.is_grad_enabled() and weights.requires_grad:
            weights = self._accounted(weights, experts, scores, load)
        return Choices(experts.flatten(0, -2), weights.flatten(0, -2), is_admitted)

    def _accounted(self, weights: Tensor, experts: Tensor, scores: Tensor, whole_load: Tensor | None) -> Tensor:
        """`weights`, whose backward pass counts the load or adds the gradient of the balance loss."""
        if self.balance == "bias" and self.is_counting:
            return _counting(weights, load_of(experts, len(self.weight)), self.expert_load)
        if self.balance == "loss":
            assert whole_load is not None
            loss = balance_loss(scores.flatten(0, -2), whole_load, self.top_k) * self.balance_rate
            return _with_loss(weights, loss, self.loss_scale / self.num_copies)
        return weights


class TokenCounts(nn.Module):
    """Chosen experts (..., T, k) of a micro-batch -> number of choices of each expert (E,), and the position of each
    choice at its expert (..., T, k), from 0, in the order of sample, token, preference.

    It is a module so that context parallelism can replace it by one that counts whole micro-batches.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        load = load_of(experts, self.num_experts)
        by_expert = experts.flatten().argsort(stable=True)
        first = (load.cumsum(0) - load).repeat_interleave(load)
        in_a_row = torch.arange(experts.numel(), device=experts.device)
        positions = torch.empty_like(first).index_copy(0, by_expert, in_a_row - first)
        return load, positions.view_as(experts)


def load_of(experts: Tensor, num_experts: int) -> Tensor:
    """(E,) int64: how often each is chosen in `experts`, of any shape."""
    flat = experts.flatten()
    return flat.new_zeros(num_experts).scatter_add(0, flat, torch.ones_like(flat))


def balance_loss(scores: Tensor, load: Tensor, top_k: int) -> Tensor:
    """Scalar: 1 if the load is even, else more. `scores` (N, E) are probabilities, `load` (E,) the choices.

    `load` may be that of more tokens than N: then the result is what these N tokens contribute to the loss.
    """
    shares = load.to(scores.dtype) / load.sum()
    return load.numel() * shares @ scores.sum(0) * (top_k / load.sum())


class _Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, load: Tensor, counter: Tensor) -> Tensor:
        ctx.load, ctx.counter = load, counter
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.counter.add_(ctx.load)
        return gradients[0], None, None


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = torch.full_like(loss, scale)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.scale, None


def _counting(weights: Tensor, load: Tensor, counter: Tensor) -> Tensor:
    out: Tensor = _apply_uncompiled(_Counting, weights, load, counter)
    return out


def _with_loss(weights: Tensor, loss: Tensor, scale: float) -> Tensor:
    out: Tensor = _apply_uncompiled(_WithLoss, weights, loss, scale)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apply_uncompiled(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """torch 2.13 would drop the loss's gradient when it compiles this, without an error."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]
