"""A mixture of experts that replaces a dense feed-forward layer (Shazeer et al. 2017; DeepSeek-AI 2024).

Shapes: N tokens, D = dim, E experts, k experts of each token, F = width of an expert.

    router    chooses the experts of each token and their weights          (see `router`)
    experts   stacked weights; gets tokens sorted by expert, and the number of each. Expert parallelism replaces its
              forward from outside, and depends on nothing else
    merge     a pass-through: tensor parallelism sums here what ranks with a part of each expert have computed
    shared    the experts that every token goes through, as one dense layer

Every sum has a fixed order and no two writes go to one address, so results do not vary from run to run. Called by
`transformer`.
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
"""torch's grouped product needs rows of a multiple of this many bytes."""


class MixtureOfExperts(nn.Module):
    """(B, T, D) -> (B, T, D): the weighted sum of k experts of each token, and of the shared ones.

    With a capacity, choices beyond the capacity of an expert in a micro-batch are dropped: they add nothing.
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
        hidden = F.silu(grouped_product(tokens, self.gate, counts)) * grouped_product(tokens, self.up, counts)
        return grouped_product(hidden, self.down, counts)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Each of G groups of rows times its own matrix: (N, I) sorted by group, (G, I, O), counts (G,) -> (N, O).

    Without padding rows, and in one kernel if torch has one. The gradient of a group without rows is zero.
    """
    if _has_kernel(rows, weights):
        return F.grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))
    parts = torch.split(rows, counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def _has_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch 2.13 has a grouped product for these: bf16 on every device, more on the CPU unless it compiles."""
    kinds = {torch.bfloat16}
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        kinds |= {torch.float16, torch.float32}
    if rows.dtype not in kinds or not weights.is_contiguous():
        return False
    return all(width > 0 and width * rows.element_size() % _GROUPED_BYTES == 0 for width in weights.shape[1:])
