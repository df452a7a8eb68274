"""plan_of(spec): how the spec's model may be split. The plan that the spec declares, or the plan of a built-in task.

The submit check, the planner and the engine use the same result. Pure, except that it reads config.json of a Hugging
Face model's directory.
"""

from __future__ import annotations

from pydantic import ValidationError

from shoal_workers.contract.model.hf import hugging_face_of, plan_of_hugging_face
from shoal_workers.contract.model.lm import LM_TASK, LanguageModelConfig
from shoal_workers.contract.model.plan import ParallelPlan, TensorStyle
from shoal_workers.contract.spec import JobSpec


def plan_of(spec: JobSpec) -> ParallelPlan | None:
    """None: the model has no plan, and runs on the data axes only."""
    if spec.plan is not None:
        return spec.plan
    if (hugging_face := hugging_face_of(spec.task, spec.model)) is not None:
        return plan_of_hugging_face(hugging_face)
    config = language_model_of(spec)
    return None if config is None else plan_of_language_model(config)


def language_model_of(spec: JobSpec) -> LanguageModelConfig | None:
    """Settings of the built-in model; None for another task, and for invalid settings, which are refused elsewhere."""
    if spec.task != LM_TASK:
        return None
    try:
        return LanguageModelConfig.model_validate(spec.model)
    except ValidationError:
        return None


def plan_of_language_model(config: LanguageModelConfig) -> ParallelPlan:
    """With the module names of `shoal_workers.tasks.transformer`."""
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
    """Blocks whose feed-forward layer is a mixture of experts."""
    return max(0, config.num_layers - config.num_dense_layers) if config.num_experts else 0


def feed_forward_dim(config: LanguageModelConfig) -> int:
    """Width of a dense block's SwiGLU; default: 8/3 x dim, rounded up to a multiple of 32."""
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
    """Sizes that column and row styles split, besides the heads. The vocabulary may be split unevenly."""
    widths = {}
    if num_expert_layers(config) < config.num_layers:
        widths["model.hidden_dim"] = feed_forward_dim(config)
    if num_expert_layers(config):
        widths["model.expert_hidden_dim"] = expert_dim(config)
    if num_expert_layers(config) and config.num_shared_experts:
        widths["model.num_shared_experts x model.expert_hidden_dim"] = config.num_shared_experts * expert_dim(config)
    return widths
