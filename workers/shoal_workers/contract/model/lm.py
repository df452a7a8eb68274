"""Settings of the built-in language model task: its sizes, and the text that it reads."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from shoal_workers.contract.base import Frozen

LM_TASK = "shoal_workers.tasks.lm:LanguageModel"
STDLIB_CORPUS = "python-stdlib"
BYTE_TOKENIZER = "bytes"
BYTE_VOCABULARY = 257
"""One token per byte, and one that ends a document."""


class LanguageModelConfig(Frozen):
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

    @model_validator(mode="after")
    def _divides(self) -> LanguageModelConfig:
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"model.dim {self.dim} is not a multiple of model.num_heads {self.num_heads}: "
                f"{self.dim} = {self.dim // self.num_heads} x {self.num_heads} + {self.dim % self.num_heads}."
            )
        if self.head_dim is None and (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"model.dim / model.num_heads = {self.dim // self.num_heads} is odd; RoPE rotates pairs. "
                f"Set dim to {self.dim + self.num_heads}, or choose another num_heads."
            )
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"model.head_dim {self.head_dim} is odd; RoPE rotates pairs. Use {self.head_dim + 1}.")
        if self.num_experts and self.top_k > self.num_experts:
            raise ValueError(f"model.top_k {self.top_k} is more than model.num_experts {self.num_experts}.")
        kv = self.num_kv_heads or self.num_heads
        if self.num_heads % kv:
            raise ValueError(f"model.num_kv_heads {kv} does not divide model.num_heads {self.num_heads}.")
        return self


class TextDataConfig(Frozen):
    """Text as token shards on local disk, prepared once per node and memory-mapped."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["corpus"], "properties": {"corpus": {"const": STDLIB_CORPUS}, "paths": {"maxItems": 0}}},
                {"required": ["paths"], "properties": {"corpus": {"type": "null"}, "paths": {"minItems": 1}}},
            ]
        }
    )

    corpus: str | None = Field(None, max_length=255)
    """A corpus by name: "python-stdlib", the running interpreter's own standard library."""
    paths: tuple[str, ...] = Field((), max_length=10_000)
    """Text files, globs and directories (read recursively). Every node must be able to read them."""
    tokenizer: str = Field(BYTE_TOKENIZER, max_length=4096)
    """"bytes": one token per byte, plus one that ends a document. Or the path of a tokenizers JSON file."""
    validation_fraction: float = Field(0.05, ge=0, lt=1)
    """Fraction of the documents for validation only, chosen by the hash of their text."""
    max_bytes: int | None = Field(None, ge=1)
    """Maximum number of bytes of text to read (whole documents, in order of their paths); default: all."""
    cache_dir: str | None = Field(None, max_length=4096)
    """Where token shards are kept. Default: ~/.cache/shoal/data."""
    encoding_errors: Literal["strict", "replace"] = "replace"
    """Bytes that are not UTF-8: "strict" refuses the file, "replace" reads U+FFFD instead."""

    @model_validator(mode="after")
    def _one_source(self) -> TextDataConfig:
        if (self.corpus is None) == (not self.paths):
            raise ValueError(
                'data must contain exactly one of corpus and paths, for example data: {corpus: "python-stdlib"}.'
            )
        if self.corpus is not None and self.corpus != STDLIB_CORPUS:
            raise ValueError(f'data.corpus {self.corpus!r} is not known; the only named corpus is "{STDLIB_CORPUS}".')
        return self
