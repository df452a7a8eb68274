"""A decoder-only transformer: RMSNorm before each layer, RoPE, grouped query attention, SwiGLU or a mixture of such
experts, scaled residual init.

After LLaMA (Touvron et al. 2023), with the residual init of GPT-2 (Radford et al. 2019). Shapes in the docstrings: B
samples, T tokens, D = dim, H query heads, G key and value heads, K = width of a head, V = vocabulary.

It contains no code for parallelism. Layouts are applied from outside, by the names of its modules
(contract/language_model.py):

    embedding, dropout, blocks.*, norm, head
    blocks.*: attention_norm, attention.{query, key, value, core, out}, feed_forward_norm, feed_forward
    feed_forward: {gate, up, down}, or with experts {router, experts, merge, shared.{gate, up, down}}

It can be sharded and re-formed: no state but parameters and one constant table, no Python state that depends on data, a
tied head that holds the embedding's own parameter, and weights from torch's global generator in a fixed order. Built by
lm.py.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.language_model import LanguageModelConfig, feed_forward_dim
from shoal_workers.tasks.feed_forward import Experts, FeedForward, MixtureOfExperts, Router

_INIT_GAIN = 0.02 * math.sqrt(768)
"""GPT-2's 0.02 at its width of 768. Narrower models need more: at width 128 it costs 0.2 bits per byte in 200 steps."""


class Transformer(nn.Module):
    """Tokens (B, T) int64, and their positions (T,) int64 in the sequence -> logits (B, T, V), in the weights' dtype.

    Without positions the tokens are the first T. Only attention uses the positions, and it always gets its T tokens,
    also if the sequence is split between layers.
    """

    rotations: Tensor

    def __init__(self, config: LanguageModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if config.tied_head:  # on meta first: a weight that is discarded must not be drawn from the generator
            self.head = nn.Linear(config.dim, vocab_size, bias=False, device="meta")
            self.head.weight = self.embedding.weight
        else:
            self.head = nn.Linear(config.dim, vocab_size, bias=False)
        # on the CPU even under torch.device("meta"): no checkpoint contains it, so no restore would fill it
        table = rotation_table(config.seq_len, head_dim(config), config.rope_theta)
        self.register_buffer("rotations", table, persistent=False)
        self._init_weights(config.num_layers)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotations = self.rotations[:, positions]
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, rotations)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _init_weights(self, num_layers: int) -> None:
        """Draw every weight, from normal distributions.

        Embedding: 1 / sqrt(D), so that the initial logits of a tied head have unit variance. Linear layers and experts:
        0.55 / sqrt(fan in), and again 1 / sqrt(2 x num_layers) for those that write into the residual stream.
        """
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and module.weight is not self.embedding.weight:
                writers = 2 * num_layers if name.endswith((".out", ".down")) else 1
                nn.init.normal_(module.weight, std=_INIT_GAIN / math.sqrt(module.in_features * writers))
            elif isinstance(module, Router):
                nn.init.normal_(module.weight, std=_INIT_GAIN / math.sqrt(module.weight.shape[1]))
            elif isinstance(module, Experts):
                for weight, writers in ((module.gate, 1), (module.up, 1), (module.down, 2 * num_layers)):
                    nn.init.normal_(weight, std=_INIT_GAIN / math.sqrt(weight.shape[1] * writers))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream (B, T, D). FSDP gathers it as one unit."""

    def __init__(self, config: LanguageModelConfig, layer: int) -> None:
        super().__init__()
        has_experts = config.num_experts > 0 and layer >= config.num_dense_layers
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = (
            MixtureOfExperts(config) if has_experts else FeedForward(config.dim, feed_forward_dim(config))
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotations))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019, computed in fp32 whatever the dtype of x: (..., D) -> (..., D)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values (Ainslie et al. 2023): (B, T, D) -> (B, T, D).

    `rotations` (2, T, K / 2) are those of the tokens' positions, see `rotation_table`. The only part that mixes tokens
    is a module of its own, `core`, which context parallelism replaces.
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
        # the number of heads is the width of the projection divided by K: tensor parallelism gives a rank some of them
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
    """Width K of a head."""
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
