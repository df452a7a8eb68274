"""Settings of the models of transformers, and what the content of a config.json says about them.

    PretrainedConfig            any model: a directory, or a config
    HuggingFaceConfig           a causal language model, with adapters or without
    PreferenceModelConfig       one that is trained on preferences

What cannot be trained (quantized weights, adapters of the embedding) is refused at submission, in words from here. How
such a model may be split is in `hugging_face_plan`, the settings of encoders are in `encoders`, and
`shoal_workers.tasks` builds the models. Called by the submit check, the planner and the tasks. Pure, except that it
reads the files of a model's directory; it never imports torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from shoal_workers.contract.families import DROPOUTS_OF_ENCODERS, FAMILIES, taken_for_experts
from shoal_workers.contract.rules import Rule, Section, require_one

HF_TASK = "shoal_workers.tasks.hf:HuggingFaceLM"
SFT_TASK = "shoal_workers.tasks.sft:SupervisedFineTuning"
DPO_TASK = "shoal_workers.tasks.dpo:DirectPreferenceOptimization"
HF_TASKS = (HF_TASK, SFT_TASK, DPO_TASK)
"""The tasks whose model is a causal language model of transformers."""
PREFIX = "network."
"""Prefix of module and parameter names: transformers' model is a child of our module, which returns its logits."""
REFERENCE = "reference."
"""Prefix of the names of a second, frozen model, with which preferences are compared."""
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
_SLOW_TOKENIZER_NAMES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)
"""Tokenizer files of SentencePiece, of byte-pair encoding as in GPT-2, and of WordPiece, which Shoal does not read."""
_MAX_CONFIG_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of the head in the files of causal language models."""
_ENDS = frozenset({"lm_head", "embed_tokens", "wte", "embed_in"})
"""Layers at the ends of a model, which get no adapter."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021): they are trained, and the model beside them is frozen."""

    r: int = Field(16, ge=1, le=1 << 16)
    """Rank of each adapter."""
    alpha: float = Field(32.0, gt=0, le=1e6)
    """The output of an adapter is multiplied by alpha / r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Probability of dropout of an adapter's input."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Last parts of the names of the layers that get an adapter, for example [q_proj, v_proj]; "all-linear": all linear
    layers but the head."""

    @model_validator(mode="before")
    @classmethod
    def _no_quantization(cls, data: Any) -> Any:
        names = sorted(_QUANTIZATION & set(data)) if isinstance(data, dict) else []
        if names:
            raise ValueError(
                f"model.lora has {names[0]}: QLoRA is not supported, because Shoal keeps the model beside the adapters "
                "in fp32 and shards it over the workers. Remove the key; more workers, or parallelism.dp_shard, make "
                "each worker's part smaller."
            )
        targets = data.get("target_modules") if isinstance(data, dict) else None
        # Behind this validator a strict model takes no list of JSON for a tuple.
        return {**data, "target_modules": tuple(targets)} if isinstance(targets, list) else data

    rules = (
        Rule(
            lambda lora: _ENDS & set(lora.target_modules),
            lambda lora: (
                f"model.lora.target_modules names {min(_ENDS & set(lora.target_modules))!r}: adapters of the "
                "embedding and of the head are not supported. Name linear layers of the blocks."
            ),
        ),
    )


_QUANTIZATION = frozenset({"load_in_4bit", "load_in_8bit", "quantization_config", "quantization", "bits", "qlora"})


class PretrainedConfig(Section):
    """A model of transformers from a local directory, with its weights, or from a config, with random weights."""

    path: str | None = Field(None, min_length=1, max_length=4096)
    """Directory with config.json and *.safetensors. Every node must be able to read it; nothing is downloaded."""
    config: dict[str, Any] | None = Field(
        None, json_schema_extra={"required": ["model_type"], "properties": {"model_type": {"type": "string"}}}
    )
    """The content of a config.json. `model_type` names the architecture; missing keys have transformers' defaults."""

    rules: ClassVar[tuple[Rule[Any], ...]] = (
        require_one(
            ("path", "config"),
            "model must contain exactly one of path (a local directory) and config (the content of a config.json).",
        ),
        Rule(
            lambda model: model.config is not None and not isinstance(model.config.get("model_type"), str),
            'model.config must contain a model_type, for example {"model_type": "llama"}.',
        ),
    )


class HuggingFaceConfig(PretrainedConfig):
    """A causal language model from a local directory, with its weights, or from a config, with random weights."""

    seq_len: int = Field(256, ge=1, le=1 << 22)
    """Tokens per sample."""
    lora: LoraConfig | None = None
    """Adapters, by the library peft. Null: the whole model is trained."""

    @property
    def has_reference(self) -> bool:
        """True if a second, frozen model is beside the one that trains."""
        return False


class PreferenceLoss(StrEnum):
    """What is minimised over the margin between a chosen and a rejected answer."""

    SIGMOID = "sigmoid"
    """Direct preference optimization (Rafailov et al. 2023)."""
    IPO = "ipo"
    """Identity preference optimization (Azar et al. 2023), over the mean log probability of an answer's tokens."""
    HINGE = "hinge"
    """Sequence likelihood calibration (Zhao et al. 2023)."""


class DpoConfig(Section):
    """How preferences become a loss. The reference model is the one in model.path."""

    loss: PreferenceLoss = PreferenceLoss.SIGMOID
    """"sigmoid" (Rafailov et al. 2023), "ipo" (Azar et al. 2023) over the mean log probability of an answer's tokens,
    or "hinge" (Zhao et al. 2023)."""
    beta: float = Field(0.1, gt=0, le=1e3)
    """How close the model stays to the reference; larger is closer."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that chosen and rejected are exchanged in a line (Mitchell 2023). Only with the loss "sigmoid"."""

    rules = (
        Rule(
            lambda dpo: dpo.label_smoothing and dpo.loss is not PreferenceLoss.SIGMOID,
            lambda dpo: (
                f"model.dpo.label_smoothing is {dpo.label_smoothing}, and model.dpo.loss {str(dpo.loss)!r} has "
                'none. Set it to 0, or the loss to "sigmoid".'
            ),
        ),
    )


class PreferenceModelConfig(HuggingFaceConfig):
    """A causal language model that is trained on preferences."""

    dpo: DpoConfig = DpoConfig()
    """How preferences become a loss."""

    rules: ClassVar[tuple[Rule[Any], ...]] = (
        *HuggingFaceConfig.rules,
        Rule(
            lambda model: model.config is not None and model.lora is None,
            "model.config draws random weights, and preferences need a model that gives answers already: name its "
            "directory in model.path.",
        ),
    )

    @property
    def has_reference(self) -> bool:
        """With adapters the reference is the model without them."""
        return self.lora is None


def hugging_face_of(task: str, model: dict[str, Any]) -> HuggingFaceConfig | None:
    """Settings of a causal language model of transformers; None for another task, and for invalid settings, which the
    submit check refuses."""
    if task not in HF_TASKS:
        return None
    try:
        return (PreferenceModelConfig if task == DPO_TASK else HuggingFaceConfig).model_validate(model)
    except ValidationError:
        return None


def config_of(settings: PretrainedConfig) -> dict[str, Any]:
    """Return the content of the model's config.json, untied if the files have a trained head; {} if it cannot be read
    here."""
    return settings.config if settings.config is not None else _read_config(settings.path or "")


def _read_config(path: str) -> dict[str, Any]:
    """Return the content of a model directory's config.json; {} if it does not exist here or cannot be read."""
    file = Path(path).expanduser() / CONFIG_NAME
    try:
        if not file.is_file() or file.stat().st_size > _MAX_CONFIG_BYTES:
            return {}
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {**content, "tie_word_embeddings": False} if _has_trained_head(file.parent) else content


def has_ignored_tie(settings: PretrainedConfig) -> bool:
    """True if config.json says that head and embedding are one, and the files have different values of the two. As in
    transformers they are not tied then."""
    return settings.path is not None and _has_trained_head(Path(settings.path).expanduser())


def _has_trained_head(directory: Path) -> bool:
    try:
        config = json.loads((directory / CONFIG_NAME).read_bytes())
        is_tied = config.get("tie_word_embeddings", FAMILIES[config["model_type"]].tied)
        return bool(is_tied) and _is_head_trained(directory, directory.stat().st_mtime_ns)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


@lru_cache(maxsize=64)
def _is_head_trained(directory: Path, modified_ns: int) -> bool:
    tensors: dict[str, tuple[Any, Path, int, int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_bytes))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = (8 + header_bytes + offset for offset in tensor["data_offsets"])
                tensors[name] = ([tensor["dtype"], tensor["shape"]], file, begin, end)
    head = next((tensors[name] for name in _HEADS if name in tensors), None)
    embeddings = [
        tensor
        for name, tensor in tensors.items()
        if head is not None and name not in _HEADS and ("embed" in name or "wte" in name) and tensor[0] == head[0]
    ]
    return head is not None and len(embeddings) == 1 and not _are_equal(head, embeddings[0])


def _are_equal(first: tuple[Any, Path, int, int], second: tuple[Any, Path, int, int]) -> bool:
    with first[1].open("rb") as file, second[1].open("rb") as other:
        file.seek(first[2])
        other.seek(second[2])
        for at in range(first[2], first[3], _PIECE_BYTES):
            size = min(_PIECE_BYTES, first[3] - at)
            if file.read(size) != other.read(size):
                return False
    return True


def quantized(config: Mapping[str, Any]) -> str:
    """Why a model with this content of config.json cannot be trained, as a sentence; empty: it is not quantized."""
    settings = config.get("quantization_config")
    if not settings:
        return ""
    method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else "unknown"
    return (
        f"the model's config has a quantization_config (quant_method {method!r}), and Shoal trains fp32 parameters: "
        "QLoRA and training of quantized weights are not supported. Write the weights in bf16 or fp32 (transformers: "
        "from_pretrained(..., dtype=torch.bfloat16), model.dequantize(), save_pretrained), and name that directory; "
        "model.lora then trains adapters beside them."
    )


def lacks_tokenizer(settings: PretrainedConfig) -> bool:
    """Return whether the model's directory is on this machine and has no tokenizer that can be read."""
    if settings.path is None:
        return False
    directory = Path(settings.path).expanduser()
    return (directory / CONFIG_NAME).is_file() and not (directory / TOKENIZER_NAME).is_file()


def slow_tokenizer_of(settings: PretrainedConfig) -> tuple[str, ...]:
    """Names of the tokenizer files in the model's directory whose format Shoal does not read."""
    directory = Path(settings.path or "").expanduser()
    return tuple(name for name in _SLOW_TOKENIZER_NAMES if settings.path and (directory / name).is_file())


def architecture_of(settings: PretrainedConfig) -> str:
    """`model_type` of the config; empty if the config cannot be read here."""
    return str(config_of(settings).get("model_type", ""))


OF_OTHER_HEADS = frozenset({"classifier_dropout", "summary_first_dropout", "summary_last_dropout"})
"""Dropouts in a config that a causal language model does not have."""
_DROPOUTS = ("dropout", "pdrop", "drop_path", "layerdrop")


def dropout_of(settings: PretrainedConfig) -> tuple[str, float] | None:
    """Key and value of the first dropout of the model that is larger than 0; None if there is none."""
    config, architecture = config_of(settings), architecture_of(settings)
    if isinstance(settings, HuggingFaceConfig):
        if settings.lora is not None and settings.lora.dropout:
            return "lora.dropout", settings.lora.dropout
        defaults = FAMILIES[architecture].dropouts if architecture in FAMILIES else {}
        others = OF_OTHER_HEADS
    else:
        defaults, others = DROPOUTS_OF_ENCODERS.get(architecture, {}), frozenset()
    values = {**defaults, **config}
    rates = (
        (key, value)
        for key, value in values.items()
        if any(word in key for word in _DROPOUTS) and key not in others and isinstance(value, int | float)
    )
    return next((rate for rate in rates if rate[1] > 0), None)


def is_adapted(linear: str, lora: LoraConfig, model_type: str) -> bool:
    """Return whether a linear layer of the blocks, by its name, gets an adapter. Names match as in peft."""
    if lora.target_modules == "all-linear":
        return linear.rpartition(".")[2] not in taken_for_experts(model_type)
    return any(f".{linear}".endswith(f".{target}") for target in lora.target_modules)
