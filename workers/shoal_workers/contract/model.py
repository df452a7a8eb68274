"""What is known of any model without torch: how it may be split, and its shape.

A ParallelPlan says which modules each parallel axis acts on, by their names, so that a layout can be checked at
submission. The submit check, the planner and the engine read the same plan (`spec.plan_of`). The built-in language
model has a plan of its own (`language_model`); that of a Hugging Face model is derived from its config.json
(`hugging_face_plan`); a user's task declares one in the spec's `plan` section. A model without a plan runs on the data
axes (dp_replicate, dp_shard), which need no plan.

A ModelShape has the tensors of a model that was built. The supervisor compares those of two workers, when new code is
to train on with the state of the old. Pure.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.plain_text import OfTask

TASK_STATE = "_shoal_task_state"
"""Module of a model that has what `state_dict` of its task returns. An export leaves it out."""


class TensorStyle(StrEnum):
    """What tensor parallelism does with a module."""

    COLUMN = "column"
    """nn.Linear: its outputs are split."""
    ROW = "row"
    """nn.Linear: its inputs are split; its outputs are summed and split along the sequence."""
    EMBEDDING = "embedding"
    """nn.Embedding: its vocabulary is split; its output is split along the sequence."""
    HEAD = "head"
    """nn.Linear to the vocabulary, which is split; the loss is computed on the split logits."""
    SEQUENCE = "sequence"
    """A norm: whole on every rank, applied to that rank's part of the sequence."""
    GATHER = "gather"
    """A module whose first input is gathered along the sequence and whose last layer is a `row`, such as attention or
    feed-forward."""
    WHOLE = "whole"
    """A module that every rank computes on the whole sequence: its first input is gathered, its output is split."""
    PARTIAL = "partial"
    """A module that is whole on every rank and applied to that rank's heads, such as a norm of each query head."""


class ParallelPlan(Frozen):
    """The modules that each parallel axis acts on."""

    blocks: str = ""
    """The nn.ModuleList of equal, consecutive blocks. Pipeline stages consist of them; recomputation and torch.compile
    act on each of them."""
    num_blocks: int = Field(0, ge=0)
    """Number of blocks."""
    first: tuple[str, ...] = ()
    """Modules that only the first stage has, for example the embedding."""
    last: tuple[str, ...] = ()
    """Modules that only the last stage has, for example the final norm and the head."""
    tied: dict[str, str] = Field(default_factory=dict)
    """Parameters that are one tensor with others: {"head.weight": "embedding.weight"}. Not required: they are found in
    the model. An entry that the model does not have is refused."""
    hidden_size: int = Field(0, ge=0)
    """Width of a block's output, (samples, sequence, hidden_size). Required for pipelines."""
    tensor: dict[str, TensorStyle] = Field(default_factory=dict)
    """Style of each module. Required for tensor parallelism."""
    attention: str = ""
    """Modules called with (queries, keys, values), each (B, heads, T, K), that compute causal attention, for example
    `blocks.*.attention.core`. Required for context parallelism."""
    sequence: dict[str, int] = Field(default_factory=dict)
    """Names of what has the tokens of a sequence, and the dim of the tokens: {"tokens": 1, "positions": 0}. Along these
    dims cp cuts what the model is called with."""
    experts: str = ""
    """Modules that hold the experts of a layer, each parameter with one slice per expert along dim 0. Required for
    expert parallelism."""
    num_experts: int = Field(0, ge=0)
    """Experts in a layer; ep must divide it."""
    num_heads: int = Field(0, ge=0)
    """Attention heads; 0: tp and Ulysses need not divide them."""
    num_kv_heads: int = Field(0, ge=0)
    """Key and value heads (grouped query attention)."""
    seq_len: int = Field(0, ge=0)
    """Tokens per sample, which cp and tp split; 0: no sequences."""
    num_params: int = Field(0, ge=0)
    """Parameters of the model, so that its memory can be predicted; 0: not known."""
    deferred_init: bool = False
    """The task declares `deferred_init`, so no worker builds the whole model."""
    widths: dict[str, int] = Field(default_factory=dict)
    """Other sizes that tp must divide, by a name for error messages: {"hidden_dim": 688}."""


_NUM_NAMED = 3


class ModelShape(OfTask):
    """Tensors of the whole model, before it is split over ranks."""

    tensors: dict[str, str]
    """Type and size of each tensor by its name, for example "float32 [64, 12]"."""


def difference(trained: ModelShape, other: ModelShape) -> str:
    """Describe how the tensors of `other` differ from those of `trained`; empty if they do not."""
    differing = [
        _describe_difference(name, trained.tensors.get(name), other.tensors.get(name))
        for name in {**trained.tensors, **other.tensors}
        if trained.tensors.get(name) != other.tensors.get(name)
    ]
    if not differing:
        return ""
    more = f"; and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
    return f"its model does not fit the state of the one that trains: {'; '.join(differing[:_NUM_NAMED])}{more}"


def _describe_difference(name: str, trained: str | None, other: str | None) -> str:
    if other is None:
        return f"{name} ({trained}) is gone"
    if trained is None:
        return f"{name} ({other}) is new"
    return f"{name} is {other} and was {trained}"
