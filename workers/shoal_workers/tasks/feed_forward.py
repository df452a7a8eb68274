"""The dense feed-forward layer of a transformer's block, and its default width. Called by `transformer` and `moe`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.model.lm import LanguageModelConfig


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


def hidden_dim(config: LanguageModelConfig) -> int:
    """The width of the settings, or the default."""
    return config.hidden_dim or default_hidden_dim(config.dim)


def default_hidden_dim(dim: int) -> int:
    """8/3 x dim, rounded up to a multiple of 32: the same number of weights as a plain layer of width 4 x dim."""
    return -(-8 * dim // 3 // 32) * 32
