"""Settings of the task that trains causal language models of Hugging Face's `transformers`, and their parallel plans,
derived from config.json. Pure, except that it reads config.json; transformers is imported only to build a model.

The tensor plans are those of transformers (`base_model_tp_plan`), for the model types below. They have the module names
and structure of LLaMA's decoder; tests compare each with the installed transformers. Other model types run on the
data axes, unless the spec declares a `plan`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError, model_validator

from shoal_workers.contract.base import Frozen, exactly_one_of
from shoal_workers.contract.model.lm import LanguageModelConfig
from shoal_workers.contract.model.plan import ParallelPlan, TensorStyle

HF_TASK = "shoal_workers.tasks.hf:HuggingFaceLM"
PREFIX = "network."
"""Prefix of module and parameter names: transformers' model is a child of our module, which returns its logits."""
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
SLOW_TOKENIZER_NAMES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)
"""Those of SentencePiece, of byte-pair encoding as GPT-2 has it, and of WordPiece, without a tokenizer.json."""
_MAX_CONFIG_BYTES = 1 << 20

TIED_BY_DEFAULT = {
    "cohere": True,
    "cohere2": True,
    "cwm": False,
    "ernie4_5": True,
    "granite": False,
    "helium": False,
    "hyperclovax": False,
    "llama": False,
    "ministral": False,
    "ministral3": False,
    "mistral": False,
    "olmo": False,
    "qwen2": False,
    "qwen3": False,
    "smollm3": True,
}
"""Model types with LLaMA's modules, and whether the head shares the embedding's weights if the config is silent."""
NORMED_HEADS = frozenset({"qwen3"})
"""Those of TIED_BY_DEFAULT with a norm on each query and key head."""


class HuggingFaceConfig(Frozen):
    """A causal language model from a local directory, with its weights, or from a config, with random weights."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("path", "config"))

    path: str | None = Field(None, min_length=1, max_length=4096)
    """Directory with config.json and *.safetensors. Every node must be able to read it; nothing is downloaded."""
    config: dict[str, Any] | None = Field(
        None, json_schema_extra={"required": ["model_type"], "properties": {"model_type": {"type": "string"}}}
    )
    """The content of a config.json. `model_type` names the architecture; missing keys have transformers' defaults."""
    seq_len: int = Field(256, ge=1, le=1 << 22)
    """Tokens per sample."""

    @model_validator(mode="after")
    def _one_source(self) -> HuggingFaceConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError(
                "model must contain exactly one of path (a local directory) and config (the content of a config.json)."
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('model.config must contain a model_type, for example {"model_type": "llama"}.')
        return self


class Sizes(Frozen):
    """Sizes of a decoder with LLaMA's structure, named as in config.json."""

    model_type: str
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    head_dim: int | None = Field(None, ge=1)
    tie_word_embeddings: bool
    pad_token_id: int | None = None


def hugging_face_of(task: str, model: dict[str, Any]) -> HuggingFaceConfig | None:
    """None for another task, and for invalid settings, which the submit check refuses."""
    if task != HF_TASK:
        return None
    try:
        return HuggingFaceConfig.model_validate(model)
    except ValidationError:
        return None


def sizes_of(settings: HuggingFaceConfig) -> Sizes | None:
    """None: the config cannot be read here, lacks a size, or its model type has other modules."""
    config = settings.config if settings.config is not None else read_config(settings.path or "")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in TIED_BY_DEFAULT or config.get("quantization_config"):
        return None
    known = {key: config[key] for key in Sizes.model_fields if key in config}
    tied = known.get("tie_word_embeddings", TIED_BY_DEFAULT[model_type])
    try:
        return Sizes.model_validate({**known, "tie_word_embeddings": tied})
    except ValidationError:
        return None


def read_config(path: str) -> dict[str, Any]:
    """The content of a model directory's config.json; {} if it does not exist here or cannot be read."""
    file = Path(path).expanduser() / CONFIG_NAME
    try:
        if not file.is_file() or file.stat().st_size > _MAX_CONFIG_BYTES:
            return {}
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def lacks_tokenizer(settings: HuggingFaceConfig) -> bool:
    """The model's directory is here and has no tokenizer that can be read."""
    if settings.path is None:
        return False
    directory = Path(settings.path).expanduser()
    return (directory / CONFIG_NAME).is_file() and not (directory / TOKENIZER_NAME).is_file()


def slow_tokenizer_of(settings: HuggingFaceConfig) -> tuple[str, ...]:
    """Files of a tokenizer in a format that is not read, in the model's directory."""
    directory = Path(settings.path or "").expanduser()
    return tuple(name for name in SLOW_TOKENIZER_NAMES if settings.path and (directory / name).is_file())


def architecture_of(settings: HuggingFaceConfig) -> str:
    """`model_type` of the config; empty if the config cannot be read here."""
    config = settings.config if settings.config is not None else read_config(settings.path or "")
    return str(config.get("model_type", ""))


def dropout_of(settings: HuggingFaceConfig) -> tuple[str, float] | None:
    """Key and value of a dropout in the config that is larger than 0; None: there is none."""
    config = settings.config if settings.config is not None else read_config(settings.path or "")
    found = ((key, value) for key, value in config.items() if "dropout" in key and isinstance(value, int | float))
    return next((one for one in found if one[1] > 0), None)


def plan_of_hugging_face(settings: HuggingFaceConfig) -> ParallelPlan | None:
    """None: the model is not known, and runs on the data axes only. Activations are not split along the sequence, so
    there is no context parallelism."""
    sizes = sizes_of(settings)
    if sizes is None:
        return None
    decoder = f"{PREFIX}model."
    block = f"{decoder}layers.*."
    tensor = {f"{block}self_attn.{name}_proj": TensorStyle.COLUMN for name in "qkv"}
    tensor |= {f"{block}mlp.{name}_proj": TensorStyle.COLUMN for name in ("gate", "up")}
    tensor |= {f"{block}self_attn.o_proj": TensorStyle.ROW, f"{block}mlp.down_proj": TensorStyle.ROW}
    if sizes.model_type in NORMED_HEADS:
        tensor |= {f"{block}self_attn.{name}_norm": TensorStyle.PARTIAL for name in "qk"}
    if sizes.pad_token_id is None:  # the row of a pad token gets no gradient, which a split embedding does not support
        tensor |= {f"{decoder}embed_tokens": TensorStyle.EMBEDDING, f"{PREFIX}lm_head": TensorStyle.HEAD}
    tied = {f"{PREFIX}lm_head.weight": f"{decoder}embed_tokens.weight"} if sizes.tie_word_embeddings else {}
    return ParallelPlan(
        blocks=f"{decoder}layers",
        num_blocks=sizes.num_hidden_layers,
        first=(f"{decoder}embed_tokens",),
        last=(f"{decoder}norm", f"{PREFIX}lm_head"),
        tied=tied,
        hidden_size=sizes.hidden_size,
        tensor=tensor,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        widths={"intermediate_size": sizes.intermediate_size},
    )


def as_language_model(settings: HuggingFaceConfig) -> LanguageModelConfig | None:
    """The built-in model with the same sizes, to predict memory and time; None: the sizes are not known."""
    sizes = sizes_of(settings)
    if sizes is None:
        return None
    try:
        return LanguageModelConfig(
            dim=sizes.hidden_size,
            num_layers=sizes.num_hidden_layers,
            num_heads=sizes.num_attention_heads,
            num_kv_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
            hidden_dim=sizes.intermediate_size,
            seq_len=settings.seq_len,
            vocab_size=sizes.vocab_size,
            tied_head=sizes.tie_word_embeddings,
        )
    except ValidationError:
        return None
