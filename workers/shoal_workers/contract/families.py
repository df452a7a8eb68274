"""The families of decoders of `transformers` that Shoal can split, as data: what their modules are called, which of
them tensor parallelism splits, where their experts are, and how their config.json spells its sizes.

A family is a `model_type`. The tensor styles are those of the model's own `base_model_tp_plan` where it has one that
Shoal's styles can express; `test_families.py` compares them with the installed transformers. What a family lacks, and
why, is in `without`. A model type that is not here runs on the data axes.

Pure data and functions of the content of a config.json. `hugging_face_plan` makes a ParallelPlan of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import Field, ValidationError

from shoal_workers.contract.base import Frozen


class Sparsity(StrEnum):
    """Which blocks of a family have experts in place of a dense feed-forward layer."""

    ALL = "all"
    AFTER_FIRST = "after_first"
    """All but the first `first_k_dense_replace`."""
    STEPS = "steps"
    """Each `decoder_sparse_step`-th, but for `mlp_only_layers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Experts of a family."""

    counts: tuple[str, ...]
    """Keys of the config that may hold their number."""
    sparsity: Sparsity = Sparsity.ALL
    num_first_dense: int = 0
    """Default of `first_k_dense_replace`."""
    shared: str = ""
    """The dense layer beside the experts, below a block."""
    shared_width: tuple[str, ...] = ()
    """Keys of the config whose product is its width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model type. Names of modules are relative to the decoder, or to a block."""

    tied: bool = False
    """True if the head shares the embedding's weights if the config does not say."""
    decoder: str = "model"
    blocks: str = "layers"
    embedding: str = "embed_tokens"
    with_embedding: tuple[str, ...] = ()
    """What else runs before the first block and has weights or draws random numbers."""
    norm: str = "norm"
    column: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    row: tuple[str, ...] = ("self_attn.o_proj",)
    partial: tuple[str, ...] = ()
    """Norms of each head."""
    partial_if: str = ""
    """Key of the config without which the model has no `partial`."""
    dense_column: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """The dense feed-forward layer: of the blocks that have one."""
    dense_row: tuple[str, ...] = ("mlp.down_proj",)
    mixture: Mixture | None = None
    is_gated: bool = True
    """The feed-forward layer has three matrices, not two."""
    isolates_packed: bool = True
    """Where positions begin anew, a token does not see those before."""
    has_latent_attention: bool = False
    """Keys and values come from a narrow vector of each token."""
    window_pattern: int = 0
    """One in so many blocks sees all tokens, if the config has a sliding window and says nothing else; 0: none."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Sizes that config.json has under another name."""
    dropouts: Mapping[str, float] = field(default_factory=dict)
    """Dropouts that are not zero by default."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Axis -> why the family does not have it. All lack cp."""


_LLAMA = Family()
_TIED_LLAMA = Family(tied=True)
_NORMED_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
_FUSED = "its {} holds several matrices one after the other, so a rank's part of it is no slice"


def _deepseek(num_first_dense: int) -> Family:
    """tp splits its feed-forward layers only: the rotated part of a key goes from one layer to all heads, beside the
    column layers."""
    return Family(
        column=(),
        row=(),
        has_latent_attention=True,
        mixture=Mixture(
            counts=("n_routed_experts", "num_experts", "num_local_experts"),
            sparsity=Sparsity.AFTER_FIRST,
            num_first_dense=num_first_dense,
            shared="mlp.shared_experts",
            shared_width=("moe_intermediate_size", "n_shared_experts"),
        ),
    )


FAMILIES: dict[str, Family] = {
    "cohere": _TIED_LLAMA,
    "cohere2": Family(tied=True, window_pattern=4),
    "cwm": _LLAMA,
    "deepseek_v2": _deepseek(0),
    "deepseek_v3": _deepseek(3),
    "ernie4_5": _TIED_LLAMA,
    "gemma": _TIED_LLAMA,
    "gemma2": Family(tied=True, window_pattern=2),
    "gemma3_text": Family(tied=True, partial=_NORMED_HEADS, window_pattern=6),
    "gpt2": Family(
        tied=True,
        decoder="transformer",
        blocks="h",
        embedding="wte",
        with_embedding=("wpe", "drop"),
        norm="ln_f",
        is_gated=False,
        names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
        },
        dropouts={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        without={"tp": _FUSED.format("c_attn")},
    ),
    "gpt_neox": Family(
        decoder="gpt_neox",
        embedding="embed_in",
        with_embedding=("emb_dropout",),
        norm="final_layer_norm",
        column=("attention.query_key_value",),
        row=("attention.dense",),
        dense_column=("mlp.dense_h_to_4h",),
        dense_row=("mlp.dense_4h_to_h",),
        is_gated=False,
    ),
    "gpt_oss": Family(
        window_pattern=2,
        isolates_packed=False,  # it makes its masks without the positions
        mixture=Mixture(counts=("num_local_experts", "num_experts")),
        without={"tp": "its attention has a parameter of its own, the sinks of the heads, beside its layers"},
    ),
    "granite": _LLAMA,
    "helium": _LLAMA,
    "hyperclovax": _LLAMA,
    "llama": _LLAMA,
    "ministral": _LLAMA,
    "ministral3": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": Family(mixture=Mixture(counts=("num_local_experts", "num_experts"))),
    "olmo": _LLAMA,
    "phi": Family(
        with_embedding=("embed_dropout",),
        norm="final_layernorm",
        row=("self_attn.dense",),
        partial=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        partial_if="qk_layernorm",
        dense_column=("mlp.fc1",),
        dense_row=("mlp.fc2",),
        is_gated=False,
    ),
    "phi3": Family(without={"tp": _FUSED.format("qkv_proj")}),
    "qwen2": _LLAMA,
    "qwen2_moe": Family(
        mixture=Mixture(
            counts=("num_experts", "num_local_experts"),
            sparsity=Sparsity.STEPS,
            shared="mlp.shared_expert",
            shared_width=("shared_expert_intermediate_size",),
        ),
    ),
    "qwen3": Family(partial=_NORMED_HEADS),
    "qwen3_moe": Family(
        partial=_NORMED_HEADS,
        mixture=Mixture(counts=("num_local_experts", "num_experts"), sparsity=Sparsity.STEPS),
    ),
    "smollm3": _TIED_LLAMA,
}


_BERT_DROPOUTS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
DROPOUTS_OF_ENCODERS: dict[str, Mapping[str, float]] = {
    "bart": {"dropout": 0.1},
    "bert": _BERT_DROPOUTS,
    "deberta-v2": _BERT_DROPOUTS,
    "distilbert": {"dropout": 0.1, "attention_dropout": 0.1, "qa_dropout": 0.1, "seq_classif_dropout": 0.2},
    "electra": {**_BERT_DROPOUTS, "summary_last_dropout": 0.1},
    "mbart": {"dropout": 0.1},
    "mt5": {"dropout_rate": 0.1},
    "pegasus": {"dropout": 0.1},
    "roberta": _BERT_DROPOUTS,
    "swin": {"drop_path_rate": 0.1},
    "t5": {"dropout_rate": 0.1},
    "xlm-roberta": _BERT_DROPOUTS,
}
"""Dropouts that are not zero by default, of model types that are no family: of encoders, with or without a decoder."""


_TAKEN_FOR_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Layers that get no adapter in a family with experts: peft takes these names, also in an exported adapter, for the
weights of the experts and of the router, which transformers has stacked since its version 5."""


class Sizes(Frozen):
    """Sizes of a decoder, named as in most families' config.json."""

    model_type: str
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    head_dim: int | None = Field(None, ge=1)
    tie_word_embeddings: bool
    num_experts: int = Field(0, ge=0)
    num_dense_layers: int = Field(ge=0)
    """Blocks with a dense feed-forward layer."""
    shared_width: int = Field(0, ge=0)
    """Width of the dense layer beside the experts."""
    expert_width: int = Field(0, ge=0)
    """Width of one expert."""
    top_k: int = Field(0, ge=0)
    """Experts of a token; 0: the config does not say."""
    q_lora_rank: int | None = Field(None, ge=1)
    """Latent attention: the width of the vector that queries come from; None means they come from the token."""
    kv_lora_rank: int = Field(0, ge=0)
    """Latent attention: the width of the vector that keys and values come from."""
    qk_nope_head_dim: int = Field(0, ge=0)
    qk_rope_head_dim: int = Field(0, ge=0)
    v_head_dim: int = Field(0, ge=0)
    sliding_window: int | None = Field(None, ge=1)
    """Tokens that a token sees in the blocks with a window."""
    num_windowed_layers: int = Field(0, ge=0)
    """Blocks with a sliding window."""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def has_experts(self) -> bool:
        """True if a block of the model has experts."""
        return self.num_dense_layers < self.num_hidden_layers

    @property
    def shared_expert(self) -> str:
        """The dense layer beside the experts, below a block; empty: no block has one."""
        return self.family.mixture.shared if self.family.mixture is not None and self.has_experts else ""


def sizes_in(config: Mapping[str, Any]) -> Sizes | None:
    """Sizes in the content of a config.json; None if the type is no family, a size is missing, or it is quantized.

    Defaults of transformers are not known here, but for those of Family: a config.json has all sizes."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES or config.get("quantization_config"):
        return None
    family = FAMILIES[model_type]
    known: dict[str, Any] = {"model_type": model_type, "tie_word_embeddings": family.tied}
    for name in Sizes.model_fields:
        key = family.names.get(name, name)
        value = config.get(key, config.get(name))  # transformers takes either
        if value is not None:
            known[name] = value
    if model_type in _HEADS_ALONE and "num_attention_heads" in known:
        known["num_key_value_heads"] = known["num_attention_heads"]
    if model_type == "gpt2" and "hidden_size" in known:
        known.setdefault("intermediate_size", 4 * known["hidden_size"])
    try:
        known |= _mixture_in(config, family.mixture, known["num_hidden_layers"])
        known["num_windowed_layers"] = _count_windowed(config, family, known["num_hidden_layers"])
        if not known["num_windowed_layers"]:
            known.pop("sliding_window", None)
        return Sizes.model_validate(known)
    except (KeyError, TypeError, ValueError, ValidationError):
        return None


def _count_windowed(config: Mapping[str, Any], family: Family, num_layers: int) -> int:
    """Count the blocks with a sliding window."""
    window = config.get("sliding_window")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        return 0
    is_qwen = str(config.get("model_type")).startswith("qwen")  # has a window on request, from some block on
    if not config.get("use_sliding_window", not is_qwen):
        return 0
    if (types := config.get("layer_types")) is not None:
        return list(types).count("sliding_attention")
    if is_qwen:
        return max(0, num_layers - int(config.get("max_window_layers", 28)))
    pattern = int(config.get("sliding_window_pattern") or family.window_pattern)
    return num_layers - (num_layers // pattern if pattern else 0)


def isolates_packed(model_type: str) -> bool:
    """Return whether it is known that examples in one sample do not see each other where positions begin anew."""
    family = FAMILIES.get(model_type)
    return family is not None and family.isolates_packed


def taken_for_experts(model_type: str) -> frozenset[str]:
    """Layers that get no adapter; empty for a model without experts, and for a type that is no family."""
    family = FAMILIES.get(model_type)
    return _TAKEN_FOR_EXPERTS if family is not None and family.mixture is not None else frozenset()


_HEADS_ALONE = frozenset({"gpt2", "gpt_neox"})
"""Each query head has a key and value head of its own."""


def _mixture_in(config: Mapping[str, Any], mixture: Mixture | None, num_layers: int) -> dict[str, int]:
    """Raises KeyError, TypeError or ValueError: something is missing, or is no number."""
    if mixture is None:
        return {"num_experts": 0, "num_dense_layers": num_layers, "shared_width": 0}
    count = next((int(config[key]) for key in mixture.counts if config.get(key) is not None), None)
    if count is None:
        raise KeyError(mixture.counts[0])
    dense = {number for number in range(num_layers) if not count or not _has_experts(config, mixture, number)}
    shared = 1 if mixture.shared_width else 0
    for key in mixture.shared_width:
        shared *= int(config[key])
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    top_k = config.get("num_experts_per_tok") or 0
    settings = {"num_experts": count, "num_dense_layers": len(dense), "shared_width": shared}
    return {**settings, "expert_width": int(width), "top_k": min(int(top_k), count)}


def _has_experts(config: Mapping[str, Any], mixture: Mixture, number: int) -> bool:
    match mixture.sparsity:
        case Sparsity.ALL:
            return True
        case Sparsity.AFTER_FIRST:
            first = config.get("first_k_dense_replace")
            return number >= (mixture.num_first_dense if first is None else int(first))
        case Sparsity.STEPS:
            step = int(config.get("decoder_sparse_step") or 1)
            return number not in (config.get("mlp_only_layers") or ()) and (number + 1) % step == 0
