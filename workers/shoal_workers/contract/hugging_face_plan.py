"""How a model of transformers may be split: its plan, the axes that it has, and why it lacks the others.

`families` says as data what the modules of a model type are called; here a ParallelPlan is made of that, of the sizes
in config.json, and of the adapters. A model whose type is no family, or whose config lacks a size, has no plan.
Called by `spec.plan_of`, by the submit check, which needs the reasons, and by the planner. Pure, except that
`hugging_face.config_of` reads config.json.
"""

from __future__ import annotations

from pydantic import ValidationError

from shoal_workers.contract.families import FAMILIES, Sizes, sizes_in
from shoal_workers.contract.hugging_face import (
    CONFIG_NAME,
    PREFIX,
    REFERENCE,
    HuggingFaceConfig,
    PretrainedConfig,
    architecture_of,
    config_of,
    is_adapted,
)
from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.contract.model import ParallelPlan, TensorStyle


def plan_of_hugging_face(settings: HuggingFaceConfig) -> ParallelPlan | None:
    """Return the plan of a Hugging Face model; None if the model is not known, and runs on the data axes only.

    Activations are not split along the sequence, so there is no context parallelism.
    """
    sizes = sizes_of(settings)
    if sizes is None:
        return None
    family = sizes.family
    decoder = f"{PREFIX}{family.decoder}."
    block = f"{decoder}{family.blocks}.*."
    embedding, head = f"{decoder}{family.embedding}", f"{PREFIX}lm_head"
    has_stages = "pp" not in _lacks(settings)
    experts = f"{block}mlp.experts" if sizes.has_experts else ""
    tensor = {} if "tp" in family.without else _tensor_of_family(settings, sizes, block, (embedding, head))
    if settings.has_reference:
        tensor |= {name.replace(PREFIX, REFERENCE, 1): style for name, style in tensor.items()}
    return ParallelPlan(
        blocks=f"{decoder}{family.blocks}",
        num_blocks=sizes.num_hidden_layers,
        first=(embedding, *(f"{decoder}{name}" for name in family.with_embedding)),
        last=(f"{decoder}{family.norm}", head),
        tied={f"{head}.weight": f"{embedding}.weight"} if sizes.tie_word_embeddings else {},
        hidden_size=sizes.hidden_size if has_stages else 0,
        tensor=tensor,
        experts=experts,
        num_experts=sizes.num_experts if experts else 0,
        num_heads=sizes.num_attention_heads if family.column else 0,
        num_kv_heads=sizes.num_key_value_heads if family.column else 0,
        widths=_widths_of_family(sizes),
    )


def axes_of_family(settings: PretrainedConfig) -> tuple[str, ...]:
    """Return the axes that a layout of the model may have."""
    data = ("dp_replicate", "dp_shard")
    plan = plan_of_hugging_face(settings) if isinstance(settings, HuggingFaceConfig) else None
    if plan is None:
        return data
    has = {"tp": bool(plan.tensor), "pp": bool(plan.hidden_size), "ep": bool(plan.experts)}
    return (*data, *(axis for axis, is_there in has.items() if is_there))


def why_not(settings: PretrainedConfig, axis: str) -> str:
    """Why a layout of the model cannot have this axis, as the end of a sentence."""
    if axis in (reasons := _lacks(settings)) or not isinstance(settings, HuggingFaceConfig):
        return reasons[axis]
    config = config_of(settings)
    if not config:
        return f"{CONFIG_NAME} in model.path cannot be read here"
    if plan_of_hugging_face(settings) is not None:
        return "no block of it has experts"
    return (
        "its config lacks a size, which transformers would take from its defaults: write the numbers of layers, heads, "
        "key-value heads and experts, the widths and the vocabulary into it"
    )


def as_language_model(settings: HuggingFaceConfig) -> LanguageModelConfig | None:
    """Settings of the built-in model with the same sizes, to predict memory and time; None if the sizes are not known,
    or the model has parts that the built-in one has not (experts that tp leaves whole, latent attention, adapters, a
    reference)."""
    sizes = sizes_of(settings)
    if sizes is None or sizes.num_experts or sizes.family.has_latent_attention:
        return None
    if settings.lora is not None or settings.has_reference:
        return None
    width = sizes.intermediate_size if sizes.family.is_gated else max(1, 2 * sizes.intermediate_size // 3)
    try:
        return LanguageModelConfig(
            dim=sizes.hidden_size,
            num_layers=sizes.num_hidden_layers,
            num_heads=sizes.num_attention_heads,
            num_kv_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
            hidden_dim=width,
            seq_len=settings.seq_len,
            vocab_size=sizes.vocab_size,
            tied_head=sizes.tie_word_embeddings,
        )
    except ValidationError:
        return None


def sizes_of(settings: HuggingFaceConfig) -> Sizes | None:
    """Sizes of the model; None if its config cannot be read here or lacks a size, its type is no family, or it is
    quantized."""
    return sizes_in(config_of(settings))


def _tensor_of_family(
    settings: HuggingFaceConfig, sizes: Sizes, block: str, ends: tuple[str, str]
) -> dict[str, TensorStyle]:
    family = sizes.family
    column, row = list(family.column), list(family.row)
    if sizes.num_dense_layers:
        column += family.dense_column
        row += family.dense_row
    if sizes.shared_expert:
        column += [f"{sizes.shared_expert}.{name}" for name in ("gate_proj", "up_proj")]
        row.append(f"{sizes.shared_expert}.down_proj")
    styles: dict[str, TensorStyle] = {}
    for name in column:
        styles |= _with_adapter(f"{block}{name}", TensorStyle.COLUMN, settings)
    for name in row:
        styles |= _with_adapter(f"{block}{name}", TensorStyle.ROW, settings)
    if not family.partial_if or config_of(settings).get(family.partial_if):
        styles |= {f"{block}{name}": TensorStyle.PARTIAL for name in family.partial}
    return styles | {ends[0]: TensorStyle.EMBEDDING, ends[1]: TensorStyle.HEAD}


def _with_adapter(module: str, style: TensorStyle, settings: HuggingFaceConfig) -> dict[str, TensorStyle]:
    """Return the styles of a layer, or of its parts if it has an adapter: the part whose split dim is the layer's own
    is split in the same way; the other part has the rank as that dim, and is whole."""
    if settings.lora is None or not is_adapted(module, settings.lora, architecture_of(settings)):
        return {module: style}
    split = "lora_B" if style is TensorStyle.COLUMN else "lora_A"
    return {f"{module}.base_layer": style, f"{module}.{split}.default": style}


def _widths_of_family(sizes: Sizes) -> dict[str, int]:
    """Sizes that tp must divide, besides the heads."""
    widths = {"intermediate_size": sizes.intermediate_size} if sizes.num_dense_layers else {}
    mixture = sizes.family.mixture
    if mixture is not None and sizes.shared_expert:
        widths[" x ".join(mixture.shared_width)] = sizes.shared_width
    return widths


def _lacks(settings: PretrainedConfig) -> dict[str, str]:
    """Axes that the model does not have -> why, as the end of a sentence."""
    if not isinstance(settings, HuggingFaceConfig):
        return dict.fromkeys(("tp", "pp", "ep", "cp"), "Shoal knows how to split causal language models only")
    family, config = FAMILIES.get(architecture_of(settings)), config_of(settings)
    if family is None:
        others = f"these have: {', '.join(sorted(name for name, one in FAMILIES.items() if 'tp' not in one.without))}"
        return dict.fromkeys(("tp", "pp", "ep", "cp"), others) | {"cp": "none has"}
    lacks = {"cp": "attention is no module in the models of transformers, so the tokens cannot be cut around it"}
    if config.get("output_router_logits"):
        lacks["pp"] = (
            "output_router_logits adds a loss of the routers of all blocks, and a stage has some of them only; "
            "without it the model can be split into stages"
        )
    if settings.has_reference:
        lacks["pp"] = "a pipeline goes through one model, and the reference is a second one; with model.lora it is none"
    if family.mixture is None:
        lacks["ep"] = "it has no experts"
    return {**lacks, **family.without}
