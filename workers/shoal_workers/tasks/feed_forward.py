"""The feed-forward layers of a transformer's block: dense, or a mixture of experts that is kept balanced.

After Shazeer et al. 2017 and DeepSeek-AI 2024. Shapes: N tokens, D = dim, E experts, k experts of each token, F = width
of an expert.

    router    chooses the experts of each token and their weights, and counts what is chosen
    experts   stacked weights; gets tokens sorted by expert, and the number of each. Expert parallelism replaces its
              forward from outside, and depends on nothing else
    merge     a pass-through: tensor parallelism sums here what ranks with a part of each expert have computed
    shared    the experts that every token goes through, as one dense layer

Two ways of balancing, chosen by `model.balance`:

    bias    a bias on the choice, not on the weights, moves by a fixed step after every optimizer step, up for experts
            with less than the mean load, down for the others (Wang et al. 2024; DeepSeek-AI 2024, section 2.1.2).
            Scores are sigmoids. Loads are counts, so the bias is the same bits in every layout.
    loss    num_experts x sum of (share of the choices x mean probability) (Fedus et al. 2022), over one micro-batch.
            Scores are a softmax. The loss is not part of the task's: its gradient is added in the backward pass.

A training loop calls the functions at the end. It passes the model only, which may have no experts:

    once per step, first         forget_load        an aborted step may have left counts
    each micro-batch, first      set_share_of_step  its share of the step's loss; 0 for a padding micro-batch
    once per step                sum_load           every rank's counts become the sum over ranks; decides nothing
    after the optimizer          move_biases        only if it stepped; communicates nothing, so it cannot fail

Every sum has a fixed order and no two writes go to one address, so results do not vary from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.language_model import LanguageModelConfig, expert_dim


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): (..., D) -> (..., D), through `hidden_dim` gated units."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


_GROUPED_BYTES = 16
"""torch's grouped product needs rows of a multiple of this many bytes."""


class MixtureOfExperts(nn.Module):
    """(B, T, D) -> (B, T, D): the weighted sum of k experts of each token, and of the shared ones.

    With a capacity, choices beyond the capacity of an expert in a micro-batch are dropped: they add nothing.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        width = expert_dim(config)
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.dim, width)
        self.merge = nn.Identity()
        self.shared = FeedForward(config.dim, config.num_shared_experts * width) if config.num_shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights, is_admitted = self.router(x)
        # Pair i is token i // k at its expert number i % k.
        expert_of = chosen.flatten()
        pairs = expert_of.argsort(stable=True)
        if is_admitted is not None:
            pairs = pairs[is_admitted.flatten()[pairs]]
        counts = count_choices(expert_of[pairs], self.router.token_counts.num_experts)
        # Copies first: a gather that reads a token k times would add k gradients to one address, in no fixed order.
        copies = x.flatten(0, -2).unsqueeze(1).expand(-1, chosen.shape[1], -1).flatten(0, 1)
        outputs = self.experts(copies.index_select(0, pairs), counts)
        by_pair = outputs.new_zeros(copies.shape).index_copy(0, pairs, outputs)
        by_token = (by_pair.unflatten(0, chosen.shape) * weights.unsqueeze(-1)).sum(1)  # in fp32
        routed: Tensor = self.merge(by_token.to(x.dtype).view_as(x))
        return routed if self.shared is None else routed + self.shared(x)


class Experts(nn.Module):
    """E SwiGLU layers side by side: tokens (N, D) sorted by expert, counts (E,) int64 that add up to N -> (N, D)."""

    hidden_dims: ClassVar[dict[str, int]] = {"gate": 2, "up": 2, "down": 1}
    """The dim of each parameter that is an expert's width: a rank that has a part of it computes a summand."""

    def __init__(self, num_experts: int, dim: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, dim, width))
        self.up = nn.Parameter(torch.empty(num_experts, dim, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, dim))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        hidden = F.silu(multiply_groups(tokens, self.gate, counts)) * multiply_groups(tokens, self.up, counts)
        return multiply_groups(hidden, self.down, counts)


def multiply_groups(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each of G groups of rows by its matrix: (N, I) sorted by group, (G, I, O), counts (G,) -> (N, O).

    Without padding rows, and in one kernel if torch has one. The gradient of a group without rows is zero.
    """
    if _has_kernel(rows, weights):
        return F.grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))
    parts = torch.split(rows, counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def _has_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Return whether torch 2.13 has a grouped product for these: bf16 on every device, more on the CPU unless it
    compiles."""
    kinds = {torch.bfloat16}
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        kinds |= {torch.float16, torch.float32}
    if rows.dtype not in kinds or not weights.is_contiguous():
        return False
    return all(width > 0 and width * rows.element_size() % _GROUPED_BYTES == 0 for width in weights.shape[1:])


_BIAS_STEP, _LOSS_WEIGHT = 1e-3, 1e-2


class Choices(NamedTuple):
    """The k experts of each of N tokens."""

    experts: Tensor
    """(N, k) int64."""
    weights: Tensor
    """(N, k), fp32. A token's weights add up to one. With k = 1 the weight is the score: it would have no gradient
    else."""
    is_admitted: Tensor | None
    """(N, k) bool: within the capacity of the expert. None if all are admitted."""


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
            weights = self._add_balancing(weights, experts, scores, load)
        return Choices(experts.flatten(0, -2), weights.flatten(0, -2), is_admitted)

    def _add_balancing(self, weights: Tensor, experts: Tensor, scores: Tensor, whole_load: Tensor | None) -> Tensor:
        """Return the weights; their backward pass counts the load or adds the gradient of the balance loss."""
        # in the backward pass, which runs exactly once for every micro-batch: a forward pass may run twice (activation
        # recomputation) or without gradients (validation, replay)
        if self.balance == "bias" and self.is_counting:
            counted: Tensor = _apply_uncompiled(
                _CountLoad, weights, count_choices(experts, len(self.weight)), self.expert_load
            )
            return counted
        if self.balance == "loss":
            assert whole_load is not None
            loss = compute_balance_loss(scores.flatten(0, -2), whole_load, self.top_k) * self.balance_rate
            with_loss: Tensor = _apply_uncompiled(_AddLoss, weights, loss, self.loss_scale / self.num_copies)
            return with_loss
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
        load = count_choices(experts, self.num_experts)
        by_expert = experts.flatten().argsort(stable=True)
        first = (load.cumsum(0) - load).repeat_interleave(load)
        pair_numbers = torch.arange(experts.numel(), device=experts.device)
        positions = torch.empty_like(first).index_copy(0, by_expert, pair_numbers - first)
        return load, positions.view_as(experts)


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen in `experts`, of any shape: (E,) int64."""
    flat = experts.flatten()
    return flat.new_zeros(num_experts).scatter_add(0, flat, torch.ones_like(flat))


def compute_balance_loss(scores: Tensor, load: Tensor, top_k: int) -> Tensor:
    """Return a scalar: 1 if the load is even, else more. `scores` (N, E) are probabilities, `load` (E,) the choices.

    `load` may be that of more tokens than N: then the result is what these N tokens contribute to the loss.
    """
    shares = load.to(scores.dtype) / load.sum()
    return load.numel() * shares @ scores.sum(0) * (top_k / load.sum())


class _CountLoad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, load: Tensor, counter: Tensor) -> Tensor:
        ctx.load, ctx.counter = load, counter
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.counter.add_(ctx.load)
        return gradients[0], None, None


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = torch.full_like(loss, scale)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.scale, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apply_uncompiled(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """torch 2.13 would drop the loss's gradient when it compiles this, without an error."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def forget_load(model: nn.Module) -> None:
    for router in _counting_routers(model):
        router.expert_load.zero_()


def set_share_of_step(model: nn.Module, share: float) -> None:
    """Set the factor of the loss of the next micro-batch, loss scaling included. Called before its forward pass."""
    for router in _routers(model):
        router.is_counting = share != 0
        router.loss_scale = share


def has_balance_loss(model: nn.Module) -> bool:
    """Return whether forward passes add gradients of a balance loss to those of the task's loss."""
    return any(router.balance == "loss" for router in _routers(model))


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
    """Move every bias one step towards an even load, and set the counts to zero."""
    for router in _counting_routers(model):
        load = router.expert_load  # integers up to the sign, so the step is the same bits in every layout
        direction = (load.sum() - load * load.numel()).sign()
        router.expert_bias.add_(direction.to(router.expert_bias.dtype), alpha=router.balance_rate)
        load.zero_()


def _counting_routers(model: nn.Module) -> list[Router]:
    return [router for router in _routers(model) if router.balance == "bias"]


def _routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]
