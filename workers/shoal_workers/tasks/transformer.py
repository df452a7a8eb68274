"""A decoder-only transformer: RMSNorm before each layer, RoPE, grouped query attention, SwiGLU, scaled residual init.

After LLaMA (Touvron et al. 2023), with the residual init of GPT-2 (Radford et al. 2019). Shapes in the docstrings:
B samples, T tokens, D = dim, H query heads, G key and value heads, K = D / H, V = vocabulary.

Written to be sharded and re-formed: no state but parameters and one constant table, no Python state that depends on
data, the tied head is used through the root module (so that FSDP2 gathers it together with the embedding), and weights
come from torch's global generator in a fixed order. The rotation table is made on the CPU even under
`torch.device("meta")`: it is in no checkpoint, so nobody could fill it in later.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.lm import LanguageModelConfig

_INIT_GAIN = 0.02 * math.sqrt(768)
"""GPT-2's 0.02 at its width of 768. Narrower models need more: at width 128 it costs 0.2 bits per byte in 200 steps."""


class Transformer(nn.Module):
    """Tokens (B, T) int64 -> logits (B, T, V), in the dtype of the weights."""

    rotations: Tensor

    def __init__(self, config: LanguageModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tied_head else nn.Linear(config.dim, vocab_size, bias=False)
        table = rotation_table(config.seq_len, config.dim // config.num_heads, config.rope_theta)
        self.register_buffer("rotations", table, persistent=False)
        self._init_weights(config.num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        rotations = self.rotations[:, : tokens.shape[1]]
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, rotations)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def _init_weights(self, num_layers: int) -> None:
        """Draw every weight, from normal distributions.

        Embedding: 1 / sqrt(D), so that a tied head starts with logits of unit variance. Linear layers:
        0.55 / sqrt(fan in), and again 1 / sqrt(2 x num_layers) for those that write into the residual stream.
        """
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writers = 2 * num_layers if name.endswith((".out", ".down")) else 1
                nn.init.normal_(module.weight, std=_INIT_GAIN / math.sqrt(module.in_features * writers))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream (B, T, D). The unit that FSDP gathers at once."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotations))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values (Ainslie et al. 2023): (B, T, D) -> (B, T, D)."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.dim // config.num_heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.dim, self.num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.dim, self.num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.dim, self.num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(self.num_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.query(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)  # (B, H, T, K)
        k = self.key(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)  # (B, G, T, K)
        v = self.value(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q, rotations),
            rotate(k, rotations),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return merged


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): (B, T, D) -> (B, T, D)."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        hidden_dim = config.hidden_dim or default_hidden_dim(config.dim)
        self.gate = nn.Linear(config.dim, hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019, computed in fp32 whatever the dtype of x: (..., D) -> (..., D)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def default_hidden_dim(dim: int) -> int:
    """8/3 x dim, rounded up to a multiple of 32: as many weights as a plain layer of width 4 x dim."""
    return -(-8 * dim // 3 // 32) * 32


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
