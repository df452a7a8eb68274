"""Which experts each token goes to, and the bookkeeping that keeps experts equally busy.

Two ways of balancing, chosen by `model.balance`:

    bias    a bias on the choice, not on the weights, moves by a fixed step after every optimizer step, up for experts
            with less than the mean load, down for the others (Wang et al. 2024; DeepSeek-AI 2024, section 2.1.2).
            Scores are sigmoids. Loads are counts, so the bias is the same bits in every layout.
    loss    num_experts x sum of (share of the choices x mean probability) (Fedus et al. 2022), over one micro-batch.
            Scores are a softmax. The loss is not part of the task's: its gradient is put in on the way back.

Both are done in the backward pass, which every micro-batch has exactly once: a forward pass may run twice (activation
recomputation) or without gradients (validation, replay). What a training loop must do is in `balance`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.model.lm import LanguageModelConfig

_BIAS_STEP, _LOSS_WEIGHT = 1e-3, 1e-2


class Choices(NamedTuple):
    """Of N tokens, k experts each."""

    experts: Tensor
    """(N, k) int64."""
    weights: Tensor
    """(N, k), fp32. A token's add up to one; with k = 1 the score itself is the weight, or it had no gradient."""
    is_admitted: Tensor | None
    """(N, k) bool: the expert has room for it. None: all are admitted."""


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
        """False while a micro-batch runs that only keeps other ranks company."""
        self.loss_scale = 1.0
        """By what the micro-batch's loss is multiplied before its backward pass; so is the balance loss."""
        self.num_copies = 1
        """Ranks that route the same tokens and whose gradients are added up: tensor parallelism."""
        if config.balance == "bias":
            self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))
            # On the CPU even under torch.device("meta"): it is in no checkpoint, so nobody could fill it in later.
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
            load, turns = self.token_counts(experts)
            if self.capacity_factor is not None:
                capacity = (load.sum().double() * self.capacity_factor / len(load)).ceil()
                is_admitted = (turns < capacity).flatten(0, -2)
        if torch.is_grad_enabled() and weights.requires_grad:
            weights = self._accounted(weights, experts, scores, load)
        return Choices(experts.flatten(0, -2), weights.flatten(0, -2), is_admitted)

    def _accounted(self, weights: Tensor, experts: Tensor, scores: Tensor, whole_load: Tensor | None) -> Tensor:
        """`weights`, whose backward pass counts the load or brings in the gradient of the balance loss."""
        if self.balance == "bias" and self.is_counting:
            return _counting(weights, load_of(experts, len(self.weight)), self.expert_load)
        if self.balance == "loss":
            assert whole_load is not None
            loss = balance_loss(scores.flatten(0, -2), whole_load, self.top_k) * self.balance_rate
            return _with_loss(weights, loss, self.loss_scale / self.num_copies)
        return weights


class TokenCounts(nn.Module):
    """Chosen experts (..., T, k) of a micro-batch -> choices of each expert (E,), and the turn of each choice at its
    expert (..., T, k), 0 being the first. In order of sample, token, preference.

    A module, so that context parallelism can see to it that it is asked about whole micro-batches.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        load = load_of(experts, self.num_experts)
        by_expert = experts.flatten().argsort(stable=True)
        first = (load.cumsum(0) - load).repeat_interleave(load)
        in_a_row = torch.arange(experts.numel(), device=experts.device)
        turns = torch.empty_like(first).index_copy(0, by_expert, in_a_row - first)
        return load, turns.view_as(experts)


def load_of(experts: Tensor, num_experts: int) -> Tensor:
    """(E,) int64: how often each is chosen in `experts`, of any shape."""
    flat = experts.flatten()
    return flat.new_zeros(num_experts).scatter_add(0, flat, torch.ones_like(flat))


def balance_loss(scores: Tensor, load: Tensor, top_k: int) -> Tensor:
    """Scalar: 1 when all is even, more when not. `scores` (N, E) are probabilities, `load` (E,) the choices.

    `load` may be that of more tokens than N: then the result is the part of their loss that these N contribute.
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
    """torch 2.13 compiles the loss's gradient away, silently."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]
