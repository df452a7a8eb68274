"""Estimate the state that a rank keeps for each parameter beside its weight, in bytes. Pure.

    adamw, adam            two moments, 8 bytes; amsgrad 12
    lion, momentum         4; sgd without momentum 0
    muon                   4 for matrices that are no embedding, 8 for all others, experts too
    adafactor              a row and a column of each matrix, whole vectors
    ema_decay              an average, 4
    frozen, or LoRA        neither gradient nor state; the base of adapters is in no snapshot either

The results are averages over the parameters of a kind (dense, experts), because the data axes mix the parameters of a
unit. They follow the optimizer classes of torch and `engine/step/own_optimizers.py` tensor by tensor;
tests/unit/service/planner/test_memory.py compares them with real ones. An optimizer of another class is estimated as
AdamW. Patterns of frozen groups are matched for the built-in model only: of any other, all parameters count as trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Any

from shoal_workers.contract.hugging_face import HuggingFaceConfig, hugging_face_of, is_adapted
from shoal_workers.contract.hugging_face_plan import sizes_of
from shoal_workers.contract.islands import IslandsSpec
from shoal_workers.contract.language_model import LanguageModelConfig, expert_dim, feed_forward_dim, num_expert_layers
from shoal_workers.contract.optimizers import MUON, OptimizerSpec, find_group, find_named_optimizer
from shoal_workers.contract.spec import JobSpec, language_model_of

if TYPE_CHECKING:
    from shoal_service.planner.shape import ModelShape

_FP32 = 4
_ADAMW_BYTES = 8.0


class Kind(StrEnum):
    TABLE = "table"
    """An embedding."""
    LAYER = "layer"
    NORM = "norm"
    EXPERTS = "experts"
    """All routed experts of a block, one slice each along dim 0."""


@dataclass(frozen=True, slots=True)
class TensorSize:
    """A parameter of the model, or `count` equal ones."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    count: int = 1

    @property
    def numel(self) -> int:
        return prod(self.shape) * self.count


@dataclass(frozen=True, slots=True)
class PerParameter:
    """Averages over all parameters of a kind, trained or not."""

    trained_share: float = 1.0
    state_bytes: float = _ADAMW_BYTES
    """Bytes of optimizer state."""
    snapshot_share: float = 1.0
    """Share that is part of snapshots."""

    @property
    def snapshot_bytes(self) -> float:
        return _FP32 * self.snapshot_share + self.state_bytes


@dataclass(frozen=True, slots=True)
class ParameterState:
    """State of the parameters of a model beside their weights, on average."""

    dense: PerParameter = PerParameter()
    """All parameters but those of routed experts."""
    experts: PerParameter = PerParameter()

    def snapshot_bytes(self, shape: ModelShape | None) -> float:
        """Return the bytes of an average parameter in a snapshot."""
        return _mean(shape, self.dense.snapshot_bytes, self.experts.snapshot_bytes)

    def trained_share(self, shape: ModelShape | None) -> float:
        """Return the trained share of the model's parameters."""
        return _mean(shape, self.dense.trained_share, self.experts.trained_share)

    def count_trained(self, shape: ModelShape) -> tuple[int, float]:
        """Return the number of trained parameters, and the mean bytes of optimizer state of each."""
        share = self.trained_share(shape)
        state = _mean(shape, self.dense.state_bytes, self.experts.state_bytes)
        return round(share * shape.params), state / share if share else 0.0

    def offloaded_bytes(self, shape: ModelShape | None) -> float:
        """Return the bytes of weight, gradient and optimizer state of an average parameter."""
        state = _mean(shape, self.dense.state_bytes, self.experts.state_bytes)
        return _FP32 * (1 + self.trained_share(shape)) + state


ALL_ADAMW = ParameterState()
"""The whole model is trained with AdamW."""


def _mean(shape: ModelShape | None, dense: float, experts: float) -> float:
    if shape is None:
        return dense
    num_experts = shape.num_moe * shape.moe.expert_params
    return ((shape.params - num_experts) * dense + num_experts * experts) / shape.params


def estimate_state(spec: JobSpec, shape: ModelShape | None) -> ParameterState:
    """Return what a job keeps for each parameter. `shape`: of its model; None if it is not known."""
    state = _estimate_without_islands(spec, shape)
    if spec.islands is None:
        return state
    return ParameterState(_add_island_state(state.dense, spec.islands), _add_island_state(state.experts, spec.islands))


def _add_island_state(part: PerParameter, islands: IslandsSpec) -> PerParameter:
    """Add what an island keeps of each trained parameter: outer weight, momentum, weight sent, and residual."""
    num_copies = 3 + (islands.compress != "none")
    return replace(part, state_bytes=part.state_bytes + num_copies * _FP32 * part.trained_share)


def _estimate_without_islands(spec: JobSpec, shape: ModelShape | None) -> ParameterState:
    hugging_face = hugging_face_of(spec.task, spec.model)
    config = language_model_of(spec)
    if hugging_face is not None and hugging_face.lora is not None and shape is not None:
        share = min(1.0, count_adapter_params(hugging_face) / shape.params)
        state = share * _state_bytes(spec.optimizer, TensorSize("", (shape.dim, shape.dim), Kind.LAYER))
        return ParameterState(PerParameter(share, state, share), PerParameter(0.0, 0.0, 0.0))
    if config is None or shape is None:
        return ParameterState(*2 * (PerParameter(state_bytes=_typical_state_bytes(spec.optimizer)),))
    by_name = bool(spec.optimizer.groups)
    tensors = list(list_tensors(config, shape.vocab_size, by_name=by_name))
    dense = [tensor for tensor in tensors if tensor.kind is not Kind.EXPERTS]
    experts = [tensor for tensor in tensors if tensor.kind is Kind.EXPERTS]
    return ParameterState(
        _average(spec.optimizer, dense), _average(spec.optimizer, experts) if experts else PerParameter()
    )


def _average(settings: OptimizerSpec, tensors: list[TensorSize]) -> PerParameter:
    trained = [tensor for tensor in tensors if not _is_frozen(settings, tensor)]
    total = sum(tensor.numel for tensor in tensors)
    state = sum(_state_bytes(settings, tensor) * tensor.numel for tensor in trained)
    return PerParameter(sum(tensor.numel for tensor in trained) / total, state / total)


def _is_frozen(settings: OptimizerSpec, tensor: TensorSize) -> bool:
    number = find_group(settings.groups, tensor.name)
    return number is not None and settings.groups[number].frozen


def _typical_state_bytes(settings: OptimizerSpec) -> float:
    return _state_bytes(settings, TensorSize("", (1024, 1024), Kind.LAYER))


def _state_bytes(settings: OptimizerSpec, tensor: TensorSize) -> float:
    """Return the bytes of state of each element, without single numbers such as a count of steps."""
    average = 0.0 if settings.ema_decay is None else _FP32
    return average + _optimizer_bytes(settings, tensor)


def _optimizer_bytes(settings: OptimizerSpec, tensor: TensorSize) -> float:
    args, path = settings.args, settings.name
    if (optimizer := find_named_optimizer(settings.name)) is not None:
        path = optimizer.path
    match path.replace(":", ".").rpartition(".")[2]:
        case "SGD":
            return _FP32 * bool(args.get("momentum"))
        case "Lion" | "Adagrad":
            return _FP32
        case "RMSprop":
            return _FP32 * (1 + bool(args.get("momentum")) + bool(args.get("centered")))
        case "Adam" | "AdamW":
            return _FP32 * (2 + bool(args.get("amsgrad")))
        case "ASGD":
            return _FP32
        case "Adafactor" if len(tensor.shape) >= 2:
            return _FP32 * (1 / tensor.shape[-1] + 1 / tensor.shape[-2])
        case "Adafactor":
            return _FP32
        case "MuonAndAdamW" if _uses_muon(settings, tensor):
            return _FP32
        case _:
            return _ADAMW_BYTES


def _uses_muon(settings: OptimizerSpec, tensor: TensorSize) -> bool:
    assert settings.name == MUON
    number = find_group(settings.groups, tensor.name)
    allowed = None if number is None else settings.groups[number].muon
    return len(tensor.shape) == 2 and (allowed if allowed is not None else tensor.kind is not Kind.TABLE)


def list_tensors(config: LanguageModelConfig, vocab_size: int, *, by_name: bool = True) -> Iterator[TensorSize]:
    """Yield the parameters of the built-in model.

    Without `by_name` equal blocks are yielded once with their count, and their names have no number.
    """
    dim = config.dim
    yield TensorSize("embedding.weight", (vocab_size, dim), Kind.TABLE)
    num_dense = config.num_layers - num_expert_layers(config)
    if by_name:
        for number in range(config.num_layers):
            yield from _list_block(config, f"blocks.{number}.", 1, has_experts=number >= num_dense)
    else:
        for count, has_experts in ((num_dense, False), (config.num_layers - num_dense, True)):
            if count:
                yield from _list_block(config, "blocks.*.", count, has_experts=has_experts)
    yield TensorSize("norm.weight", (dim,), Kind.NORM)
    if not config.tied_head:
        yield TensorSize("head.weight", (vocab_size, dim), Kind.LAYER)


def _list_block(config: LanguageModelConfig, prefix: str, count: int, *, has_experts: bool) -> list[TensorSize]:
    dim = config.dim
    head_dim = config.head_dim or dim // config.num_heads
    queries, keys = config.num_heads * head_dim, (config.num_kv_heads or config.num_heads) * head_dim

    def tensor(name: str, shape: tuple[int, ...], kind: Kind = Kind.LAYER) -> TensorSize:
        return TensorSize(prefix + name, shape, kind, count)

    def swiglu(where: str, width: int) -> list[TensorSize]:
        return [
            tensor(f"{where}.gate.weight", (width, dim)),
            tensor(f"{where}.up.weight", (width, dim)),
            tensor(f"{where}.down.weight", (dim, width)),
        ]

    attention = [
        tensor("attention_norm.weight", (dim,), Kind.NORM),
        tensor("attention.query.weight", (queries, dim)),
        tensor("attention.key.weight", (keys, dim)),
        tensor("attention.value.weight", (keys, dim)),
        tensor("attention.out.weight", (dim, queries)),
        tensor("feed_forward_norm.weight", (dim,), Kind.NORM),
    ]
    if not has_experts:
        return [*attention, *swiglu("feed_forward", feed_forward_dim(config))]
    width, num = expert_dim(config), config.num_experts
    experts = [
        tensor("feed_forward.router.weight", (num, dim)),
        tensor("feed_forward.experts.gate", (num, dim, width), Kind.EXPERTS),
        tensor("feed_forward.experts.up", (num, dim, width), Kind.EXPERTS),
        tensor("feed_forward.experts.down", (num, width, dim), Kind.EXPERTS),
    ]
    shared = swiglu("feed_forward.shared", config.num_shared_experts * width) if config.num_shared_experts else []
    return [*attention, *experts, *shared]


def count_adapter_params(settings: HuggingFaceConfig) -> int:
    """Return the number of adapter parameters, by the names of the linear layers; 0 if the family is unknown."""
    sizes, lora = sizes_of(settings), settings.lora
    if sizes is None or lora is None:
        return 0
    family, dim = sizes.family, sizes.hidden_size
    head_dim = sizes.head_dim or dim // sizes.num_attention_heads
    queries, keys = sizes.num_attention_heads * head_dim, sizes.num_key_value_heads * head_dim
    attention: dict[str, tuple[int, int]] = dict.fromkeys(family.row, (queries, dim))
    if len(family.column) == 1:  # query, key and value in one layer
        attention[family.column[0]] = dim, queries + 2 * keys
    else:
        attention |= dict(zip(family.column, ((dim, queries), (dim, keys), (dim, keys)), strict=False))
    if family.has_latent_attention:
        attention |= list_latent_layers(sizes)
    dense: dict[str, tuple[int, int]] = dict.fromkeys(family.dense_column, (dim, sizes.intermediate_size))
    dense |= dict.fromkeys(family.dense_row, (sizes.intermediate_size, dim))

    def count_params(layers: dict[str, tuple[int, int]]) -> int:
        adapted = (in_and_out for name, in_and_out in layers.items() if is_adapted(name, lora, sizes.model_type))
        return sum(lora.r * sum(in_and_out) for in_and_out in adapted)

    return sizes.num_hidden_layers * count_params(attention) + sizes.num_dense_layers * count_params(dense)


def list_latent_layers(sizes: Any) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear layers of latent attention by name (DeepSeek-AI 2024)."""
    heads, dim = sizes.num_attention_heads, sizes.hidden_size
    queries = heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
    layers = {
        "self_attn.kv_a_proj_with_mqa": (dim, sizes.kv_lora_rank + sizes.qk_rope_head_dim),
        "self_attn.kv_b_proj": (sizes.kv_lora_rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)),
        "self_attn.o_proj": (heads * sizes.v_head_dim, dim),
    }
    if sizes.q_lora_rank is None:
        return {**layers, "self_attn.q_proj": (dim, queries)}
    return {
        **layers,
        "self_attn.q_a_proj": (dim, sizes.q_lora_rank),
        "self_attn.q_b_proj": (sizes.q_lora_rank, queries),
    }
