"""A mixture of experts in the place of a dense feed-forward layer (Shazeer et al. 2017; DeepSeek-AI 2024).

Shapes: N tokens, D = dim, E experts, k of which each token goes to, F = width of an expert.

    router    which experts, with what weights                             (see `router`)
    experts   stacked weights; is given tokens sorted by expert, and how many each has. Expert parallelism replaces its
              forward from outside, and needs to know nothing else
    merge     a pass-through: where tensor parallelism adds up what ranks with a part of each expert have computed
    shared    the experts that every token goes through, as one dense layer

Every sum has a fixed order and no two writes go to one place, so results do not vary from run to run.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.model.lm import LanguageModelConfig
from shoal_workers.tasks.feed_forward import FeedForward, hidden_dim
from shoal_workers.tasks.router import Router, load_of

_GROUPED_BYTES = 16
"""torch's grouped product wants rows of a multiple of so many bytes."""


class MixtureOfExperts(nn.Module):
    """(B, T, D) -> (B, T, D): the weighted sum of k experts of each token, and of the shared ones.

    With a capacity, choices that come too late at an expert of a micro-batch are dropped: they add nothing.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        width = config.expert_hidden_dim or hidden_dim(config)
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
        counts = load_of(expert_of[pairs], self.router.token_counts.num_experts)
        # Copies first: a gather that reads a token k times would add k gradients into one place.
        copies = x.flatten(0, -2).unsqueeze(1).expand(-1, chosen.shape[1], -1).flatten(0, 1)
        answers = self.experts(copies.index_select(0, pairs), counts)
        by_pair = answers.new_zeros(copies.shape).index_copy(0, pairs, answers)
        by_token = (by_pair.unflatten(0, chosen.shape) * weights.unsqueeze(-1)).sum(1)  # in fp32
        routed: Tensor = self.merge(by_token.to(x.dtype).view_as(x))
        return routed if self.shared is None else routed + self.shared(x)


class Experts(nn.Module):
    """E SwiGLU layers side by side: tokens (N, D) sorted by expert, counts (E,) int64 that add up to N -> (N, D)."""

    hidden_dims: ClassVar[dict[str, int]] = {"gate": 2, "up": 2, "down": 1}
    """The dim of each parameter that is an expert's width: a rank that has a part of it computes a term of the sum."""

    def __init__(self, num_experts: int, dim: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, dim, width))
        self.up = nn.Parameter(torch.empty(num_experts, dim, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, dim))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        hidden = F.silu(grouped_product(tokens, self.gate, counts)) * grouped_product(tokens, self.up, counts)
        return grouped_product(hidden, self.down, counts)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Each of G groups of rows times its own matrix: (N, I) sorted by group, (G, I, O), counts (G,) -> (N, O).

    Without a row left over and in one kernel where torch has one; a group without rows has a gradient of zeros.
    """
    if _has_kernel(rows, weights):
        return F.grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))
    parts = torch.split(rows, counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def _has_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch 2.13 has a grouped product for these: of bf16 everywhere, of more on the CPU unless it compiles."""
    kinds = {torch.bfloat16}
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        kinds |= {torch.float16, torch.float32}
    if rows.dtype not in kinds or not weights.is_contiguous():
        return False
    return all(width > 0 and width * rows.element_size() % _GROUPED_BYTES == 0 for width in weights.shape[1:])
