"""The built-in language model: its settings, and the plan and the sizes that follow from them.

The names of its modules are known here and in `shoal_workers.tasks.transformer`, which builds it. The submit check and
the engine read the plan, the planner the sizes. Pure.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal_workers.contract.model import ParallelPlan, TensorStyle
from shoal_workers.contract.rules import Rule, Section

LM_TASK = "shoal_workers.tasks.lm:LanguageModel"


class LanguageModelConfig(Section):
    """A decoder-only transformer: RMSNorm, RoPE, grouped query attention, SwiGLU, or a mixture of such experts."""

    dim: int = Field(256, ge=1, le=1 << 20)
    """Width of the residual stream."""
    num_layers: int = Field(4, ge=1, le=10_000)
    """Transformer blocks."""
    num_heads: int = Field(8, ge=1, le=10_000)
    """Query heads; must divide `dim` unless `head_dim` is given."""
    head_dim: int | None = Field(None, ge=2, le=1 << 16)
    """Width of a head, even (RoPE rotates pairs). Default: dim / num_heads."""
    num_kv_heads: int | None = Field(None, ge=1, le=10_000)
    """Key and value heads (grouped query attention); must divide `num_heads`. Default: num_heads."""
    hidden_dim: int | None = Field(None, ge=1, le=1 << 22)
    """Width of the SwiGLU layer. Default: 8/3 x dim, rounded up to a multiple of 32."""
    seq_len: int = Field(256, ge=1, le=1 << 22)
    """Tokens per sample."""
    vocab_size: int | None = Field(None, ge=2, le=1 << 24)
    """Rows of the embedding; by default, and at least, the size of the tokenizer's vocabulary (257 for bytes)."""
    tied_head: bool = True
    """The output head shares the embedding's weights."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropout after the embedding, on attention weights, and on each layer's output."""
    rope_theta: float = Field(10_000.0, gt=0, allow_inf_nan=False)
    """Base of the rotation's wavelengths, in tokens; choose it larger for longer sequences."""
    norm_eps: float = Field(1e-5, gt=0, le=1)
    """Added to the mean square in RMSNorm."""
    num_experts: int = Field(0, ge=0, le=1 << 16)
    """Routed experts in each block's feed-forward layer; 0: a dense model."""
    top_k: int = Field(2, ge=1, le=1024)
    """Number of experts that process each token."""
    num_shared_experts: int = Field(0, ge=0, le=1024)
    """Number of additional experts that process every token."""
    expert_hidden_dim: int | None = Field(None, ge=1, le=1 << 22)
    """Width of one expert. Default: hidden_dim."""
    num_dense_layers: int = Field(0, ge=0, le=10_000)
    """Number of blocks at the start of a mixture-of-experts model that are dense."""
    balance: Literal["bias", "loss", "none"] = "bias"
    """How the load of the experts is balanced: with a bias on the routing scores (Wang et al. 2024), or with an
    additional loss (Fedus et al. 2022)."""
    balance_rate: float | None = Field(None, ge=0, le=1e3)
    """Step of the bias (default 1e-3), or weight of the loss (default 1e-2)."""
    capacity_factor: float | None = Field(None, gt=0, le=1e6)
    """An expert takes at most this many times its even share of a micro-batch's tokens, the first ones. Null: all."""

    rules = (
        Rule(
            lambda model: model.head_dim is None and model.dim % model.num_heads,
            lambda model: (
                f"model.dim {model.dim} is not a multiple of model.num_heads {model.num_heads}: "
                f"{model.dim} = {model.dim // model.num_heads} x {model.num_heads} + {model.dim % model.num_heads}."
            ),
        ),
        Rule(
            lambda model: model.head_dim is None and (model.dim // model.num_heads) % 2,
            lambda model: (
                f"model.dim / model.num_heads = {model.dim // model.num_heads} is odd; RoPE rotates pairs. "
                f"Set dim to {model.dim + model.num_heads}, or choose another num_heads."
            ),
        ),
        Rule(
            lambda model: model.head_dim is not None and model.head_dim % 2,
            lambda model: f"model.head_dim {model.head_dim} is odd; RoPE rotates pairs. Use {model.head_dim + 1}.",
        ),
        Rule(
            lambda model: model.num_experts and model.top_k > model.num_experts,
            lambda model: f"model.top_k {model.top_k} is more than model.num_experts {model.num_experts}.",
        ),
        Rule(
            lambda model: model.num_kv_heads and model.num_heads % model.num_kv_heads,
            lambda model: f"model.num_kv_heads {model.num_kv_heads} does not divide model.num_heads {model.num_heads}.",
        ),
    )


def plan_of_language_model(config: LanguageModelConfig) -> ParallelPlan:
    """Return the plan of the built-in language model. It has the names of the modules in
    `shoal_workers.tasks.transformer`."""
    return ParallelPlan(
        blocks="blocks",
        num_blocks=config.num_layers,
        first=("embedding", "dropout"),
        last=("norm", "head"),
        tied={"head.weight": "embedding.weight"} if config.tied_head else {},
        hidden_size=config.dim,
        tensor=_tensor_styles(config),
        attention="blocks.*.attention.core",
        sequence={"tokens": 1, "labels": 1, "positions": 0},
        experts="blocks.*.feed_forward.experts" if num_expert_layers(config) else "",
        num_experts=config.num_experts if num_expert_layers(config) else 0,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads or config.num_heads,
        seq_len=config.seq_len,
        widths=_widths(config),
    )


def num_expert_layers(config: LanguageModelConfig) -> int:
    """Number of blocks whose feed-forward layer is a mixture of experts."""
    return max(0, config.num_layers - config.num_dense_layers) if config.num_experts else 0


def feed_forward_dim(config: LanguageModelConfig) -> int:
    """Width of a dense block's SwiGLU; default: 8/3 x dim, rounded up to a multiple of 32. It has as many weights as a
    plain layer of width 4 x dim."""
    return config.hidden_dim or -(-8 * config.dim // 3 // 32) * 32


def expert_dim(config: LanguageModelConfig) -> int:
    """Width of one routed expert."""
    return config.expert_hidden_dim or feed_forward_dim(config)


def _tensor_styles(config: LanguageModelConfig) -> dict[str, TensorStyle]:
    block = "blocks.*."
    styles = {
        "embedding": TensorStyle.EMBEDDING,
        f"{block}attention_norm": TensorStyle.SEQUENCE,
        f"{block}attention": TensorStyle.GATHER,
        f"{block}attention.query": TensorStyle.COLUMN,
        f"{block}attention.key": TensorStyle.COLUMN,
        f"{block}attention.value": TensorStyle.COLUMN,
        f"{block}attention.out": TensorStyle.ROW,
        f"{block}feed_forward_norm": TensorStyle.SEQUENCE,
        f"{block}feed_forward": TensorStyle.GATHER,
    }
    layers = [f"{block}feed_forward."] if num_expert_layers(config) < config.num_layers else []
    if num_expert_layers(config) and config.num_shared_experts:
        layers.append(f"{block}feed_forward.shared.")
    for layer in layers:
        styles |= {
            f"{layer}gate": TensorStyle.COLUMN,
            f"{layer}up": TensorStyle.COLUMN,
            f"{layer}down": TensorStyle.ROW,
        }
    return styles | {"norm": TensorStyle.SEQUENCE, "head": TensorStyle.HEAD}


def _widths(config: LanguageModelConfig) -> dict[str, int]:
    """Sizes that column and row styles split, besides the heads. The vocabulary is left out: it may be split
    unevenly."""
    widths = {}
    if num_expert_layers(config) < config.num_layers:
        widths["model.hidden_dim"] = feed_forward_dim(config)
    if num_expert_layers(config):
        widths["model.expert_hidden_dim"] = expert_dim(config)
    if num_expert_layers(config) and config.num_shared_experts:
        widths["model.num_shared_experts x model.expert_hidden_dim"] = config.num_shared_experts * expert_dim(config)
    return widths
