"""Causal self-attention with rotary positions and grouped queries: one of the two layers of a transformer's block.

Shapes: B samples, T tokens, D = dim, H query heads, G key and value heads, K = width of a head.

The number of heads is not stored. It is the width of the projection divided by K, so that tensor parallelism can give a
rank some of the heads. The only part that mixes tokens is a module of its own, `core`, which context parallelism
replaces. Called by `transformer`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.model.lm import LanguageModelConfig


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values (Ainslie et al. 2023): (B, T, D) -> (B, T, D).

    `rotations` (2, T, K / 2) are those of the tokens' positions, see `rotation_table`.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        num_kv_heads = config.num_kv_heads or config.num_heads
        self.query = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.dim, num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.dim, num_kv_heads * self.head_dim, bias=False)
        self.core = CausalAttention(config.dropout)
        self.out = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = self.core(rotate(q, rotations), rotate(k, rotations), v)
        merged: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return merged


class CausalAttention(nn.Module):
    """Scaled dot products: q (B, H, T, K), k and v (B, G, T, K) with G dividing H -> (B, H, T, K). No parameters."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def head_dim(config: LanguageModelConfig) -> int:
    """K, the width of a head."""
    return config.head_dim or config.dim // config.num_heads


def rotation_table(seq_len: int, head_dim: int, theta: float) -> Tensor:
    """cos and sin of every position and frequency (Su et al. 2021): fp32 (2, T, K / 2), on the CPU."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64, device="cpu"), frequency)
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + K / 2]) of (B, H, T, K) by their position, in fp32."""
    cos, sin = rotations[0], rotations[1]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
