"""What is known of a model without torch: the settings of the built-in tasks, how a model may be split, and its shape.

A ParallelPlan says which modules each parallel axis acts on, by their names, so that a layout can be checked at
submission. The submit check, the planner and the engine read the same plan (`spec.plan_of`). The language model has a
plan of its own; that of a Hugging Face model is derived from its config.json; a user's task declares one in the spec's
`plan` section. A model without a plan runs on the data axes (dp_replicate, dp_shard), which need no plan.

Pure, except that it reads files of a Hugging Face model's directory. It never imports torch or transformers; the models
themselves are built in `shoal_workers.tasks`. Over 800 lines, because a setting changes together with the plan and the
shape that follow from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from shoal_workers.contract.base import Frozen, exactly_one_of
from shoal_workers.contract.families import DROPOUTS_OF_ENCODERS, FAMILIES, TAKEN_FOR_EXPERTS, Sizes, sizes_in
from shoal_workers.contract.mixture_weights import MAX_CHANGED_WEIGHTS, InForce, WeightChange
from shoal_workers.contract.plain_text import OfTask


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


LM_TASK = "shoal_workers.tasks.lm:LanguageModel"
STDLIB_CORPUS = "python-stdlib"
BYTE_TOKENIZER = "bytes"
BYTE_VOCABULARY = 257
"""Size of the byte tokenizer's vocabulary: one token per byte, and one that ends a document."""


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


class TextFormat(StrEnum):
    """How the text stands in a file."""

    AUTO = "auto"
    """Decided for each file by its name."""
    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"
    CSV = "csv"


class BadRows(StrEnum):
    """What happens to a row that has no text in its field."""

    REFUSE = "refuse"
    SKIP = "skip"


class TextSource(Frozen):
    """A part of a mixture."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("weight", "epochs"))

    path: str = Field(min_length=1, max_length=4096)
    """A file, glob, directory or URL, as in `paths`."""
    name: str | None = Field(None, min_length=1, max_length=63)
    """What changes of the weights call it; its path if it has no name."""
    weight: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    """Its share of the samples, relative to the weights of the others. All sources have a weight, or all have
    epochs."""
    epochs: float | None = Field(None, gt=0, le=1e6, allow_inf_nan=False)
    """How often it is read while the whole mixture is read once (`stop: {epochs: 1}`)."""
    field: str | None = Field(None, min_length=1, max_length=1024)
    """As `data.field`, which is its default."""
    format: TextFormat | None = None
    """As `data.format`, which is its default."""

    @property
    def key(self) -> str:
        return self.name if self.name is not None else self.path


class TextDataConfig(Frozen):
    """Text as token shards on local disk, prepared once per node and memory-mapped."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["corpus"],
                    "properties": {
                        "corpus": {"const": STDLIB_CORPUS},
                        "paths": {"maxItems": 0},
                        "sources": {"maxItems": 0},
                        "changes": {"maxItems": 0},
                    },
                },
                {
                    "required": ["paths"],
                    "properties": {
                        "corpus": {"type": "null"},
                        "paths": {"minItems": 1},
                        "sources": {"maxItems": 0},
                        "changes": {"maxItems": 0},
                    },
                },
                {
                    "required": ["sources"],
                    "properties": {"corpus": {"type": "null"}, "paths": {"maxItems": 0}, "sources": {"minItems": 1}},
                },
            ]
        }
    )

    corpus: str | None = Field(None, max_length=255)
    """A corpus by name: "python-stdlib", the running interpreter's own standard library."""
    paths: tuple[str, ...] = Field((), max_length=10_000)
    """Text files, globs and directories (read recursively), as paths or URLs (`s3://`, `https://` ...). Every node must
    be able to read them."""
    sources: tuple[TextSource, ...] = Field((), max_length=1000)
    """A mixture: [{path, weight}, ...] or [{path, epochs}, ...]. The order of its samples depends on the seed and the
    step alone, and each source has exactly its share."""
    changes: tuple[WeightChange, ...] = Field((), max_length=MAX_CHANGED_WEIGHTS)
    """Other weights from steps on: [{at_step: 500, weights: {web: 0.5, chats: 0.5}}, ...], in the order of their steps.
    `PATCH /v1/jobs/{id}` and `shoal update --weights` add to them while the job trains."""
    format: TextFormat = TextFormat.AUTO
    """"auto": by the name of each file, `.jsonl`, `.ndjson`, `.parquet`, `.arrow`, `.feather`, `.csv`, `.tsv`, and text
    for any other; all but Parquet and Arrow also with `.gz` or `.zst` behind it. Otherwise all files have this
    format."""
    field: str = Field("text", min_length=1, max_length=1024)
    """Where the text stands in a row of JSON lines, Parquet, Arrow and CSV: a column, or a path such as
    `message.content` or `turns.0.text`."""
    bad_rows: BadRows = BadRows.REFUSE
    """A row that cannot be read or has no text in `field`: "refuse" ends the preparation with its file and number,
    "skip" leaves it out and counts it."""
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
        if (self.corpus is not None) + bool(self.paths) + bool(self.sources) != 1:
            raise ValueError(
                "data must contain exactly one of corpus, paths and sources, for example data: "
                '{corpus: "python-stdlib"}.'
            )
        with_weight = sum(source.weight is not None for source in self.sources)
        with_epochs = sum(source.epochs is not None for source in self.sources)
        if (with_weight, with_epochs) not in {(len(self.sources), 0), (0, len(self.sources))}:
            raise ValueError(
                f"of the {len(self.sources)} entries of data.sources {with_weight} have a weight and {with_epochs} "
                "epochs. Give each of them a weight, or each of them epochs."
            )
        self._refuse_changes()
        if self.corpus is not None and self.corpus != STDLIB_CORPUS:
            raise ValueError(f'data.corpus {self.corpus!r} is not known; the only named corpus is "{STDLIB_CORPUS}".')
        return self

    def _refuse_changes(self) -> None:
        """Raises ValueError if `changes` do not fit the sources."""
        keys = [source.key for source in self.sources]
        if self.changes and not keys:
            raise ValueError("data.changes is set, and data.sources is not: only the weights of a mixture change.")
        if self.changes and len(set(keys)) < len(keys):
            twice = next(key for number, key in enumerate(keys) if key in keys[:number])
            raise ValueError(
                f"two entries of data.sources are called {twice!r}, so data.changes cannot name them. Give each a name."
            )
        for number, change in enumerate(self.changes):
            if set(change.weights) != set(keys):
                raise ValueError(
                    f"data.changes[{number}].weights names {', '.join(map(repr, change.weights))}, and the sources are "
                    f"{', '.join(map(repr, keys))}. Name each of them; 0 leaves one out."
                )
            if not any(change.weights.values()):
                raise ValueError(f"data.changes[{number}].weights are all 0. Give one source a weight.")
            if number and change.at_step <= self.changes[number - 1].at_step:
                raise ValueError(
                    f"data.changes[{number}].at_step {change.at_step} is not after that of the change before it, "
                    f"{self.changes[number - 1].at_step}."
                )
        if len(keys) * len(self.changes) > MAX_CHANGED_WEIGHTS:
            raise ValueError(
                f"data.changes has {len(self.changes)} changes of {len(keys)} weights each; {MAX_CHANGED_WEIGHTS:,} "
                "weights are allowed in all, because every checkpoint contains them."
            )

    @property
    def wanted_weights(self) -> tuple[InForce, ...]:
        """The changes, with the weights in the order of the sources."""
        return tuple(
            InForce(change.at_step, tuple(change.weights[source.key] for source in self.sources))
            for change in self.changes
        )

    def of_each_source(self) -> list[TextDataConfig]:
        """The settings of each source alone; without a mixture: these."""
        if not self.sources:
            return [self]
        shared = self.model_dump(exclude={"sources", "changes", "paths", "field", "format"})
        return [
            TextDataConfig(**shared, paths=(one.path,), field=one.field or self.field, format=one.format or self.format)
            for one in self.sources
        ]


class ExamplesConfig(Frozen):
    """Examples as JSON lines: what all tasks that learn from answers have in their data section."""

    paths: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    """Files and globs: a JSON object in each line, or rows of `*.parquet`. Every node must be able to read them."""
    validation_paths: tuple[str, ...] = Field((), max_length=10_000)
    """Files of the validation split. Without any, `validation_fraction` of the lines are taken for it."""
    validation_fraction: float = Field(0.05, ge=0, lt=1)
    """Fraction of the lines for validation only, chosen by their hash."""
    max_examples: int | None = Field(None, ge=1)
    """Most lines of the training and of the validation files to read, in order; default: all."""
    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    """Samples of similar length share a micro-batch, as many as fit into this number of tokens with their padding; then
    `batch.micro_size` is 1, and the batch, epochs and `validation.samples` count micro-batches. Null: every sample is
    padded to model.seq_len."""
    tokenizer: str | None = Field(None, max_length=4096)
    """Directory with a tokenizer and its chat template; null: model.path. "bytes": one token per byte, for prompts and
    answers that are texts."""
    cache_dir: str | None = Field(None, max_length=4096)
    """Where the tokens are kept. Default: ~/.cache/shoal/data."""


class AnswersConfig(ExamplesConfig):
    """Prompts with answers, or conversations, as JSON lines: the loss is over the tokens of the answers."""

    paths: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    """Files and globs. A JSON object in each line, or a row of `*.parquet`: {"prompt": text, "completion": text},
    {"messages": [{"role": ..., "content": ...}, ...]}, or prompt and completion as lists of messages. Every node must
    be able to read them."""
    packing: bool = False
    """Several examples in one sample, which do not see each other. Otherwise a sample has one example, and padding."""


class PreferencesConfig(ExamplesConfig):
    """Prompts with a chosen and a rejected answer, as JSON lines."""

    paths: tuple[str, ...] = Field(min_length=1, max_length=10_000)
    """Files and globs. A JSON object in each line, or a row of `*.parquet`: {"prompt": text, "chosen": text,
    "rejected": text}, or all three as lists of messages; without prompt it is what both answers begin with. Every node
    must be able to read them."""


def plan_of_language_model(config: LanguageModelConfig) -> ParallelPlan:
    """The plan of the built-in language model. It has the names of the modules in `shoal_workers.tasks.transformer`."""
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


HF_TASK = "shoal_workers.tasks.hf:HuggingFaceLM"
SFT_TASK = "shoal_workers.tasks.sft:SupervisedFineTuning"
DPO_TASK = "shoal_workers.tasks.dpo:DirectPreferenceOptimization"
HF_TASKS = (HF_TASK, SFT_TASK, DPO_TASK)
"""The tasks whose model is a causal language model of transformers."""
TEXT_TASKS = (LM_TASK, HF_TASK)
"""The tasks whose data is a `TextDataConfig`."""
PREFIX = "network."
"""Prefix of module and parameter names: transformers' model is a child of our module, which returns its logits."""
REFERENCE = "reference."
"""Prefix of the names of a second, frozen model, with which preferences are compared."""
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
SLOW_TOKENIZER_NAMES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)
"""Tokenizer files of SentencePiece, of byte-pair encoding as in GPT-2, and of WordPiece, which Shoal does not read."""
_MAX_CONFIG_BYTES = 1 << 20


class LoraConfig(Frozen):
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
        found = sorted(_QUANTIZATION & set(data)) if isinstance(data, dict) else []
        if found:
            raise ValueError(
                f"model.lora has {found[0]}: QLoRA is not supported, because Shoal keeps the model beside the adapters "
                "in fp32 and shards it over the workers. Remove the key; more workers, or parallelism.dp_shard, make "
                "each worker's part smaller."
            )
        targets = data.get("target_modules") if isinstance(data, dict) else None
        # Behind this validator a strict model takes no list of JSON for a tuple.
        return {**data, "target_modules": tuple(targets)} if isinstance(targets, list) else data

    @model_validator(mode="after")
    def _not_the_ends(self) -> LoraConfig:
        if ends := {"lm_head", "embed_tokens", "wte", "embed_in"} & set(self.target_modules):
            raise ValueError(
                f"model.lora.target_modules names {sorted(ends)[0]!r}: adapters of the embedding and of the head are "
                "not supported. Name linear layers of the blocks."
            )
        return self


_QUANTIZATION = frozenset({"load_in_4bit", "load_in_8bit", "quantization_config", "quantization", "bits", "qlora"})


class PretrainedConfig(Frozen):
    """A model of transformers from a local directory, with its weights, or from a config, with random weights."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("path", "config"))

    path: str | None = Field(None, min_length=1, max_length=4096)
    """Directory with config.json and *.safetensors. Every node must be able to read it; nothing is downloaded."""
    config: dict[str, Any] | None = Field(
        None, json_schema_extra={"required": ["model_type"], "properties": {"model_type": {"type": "string"}}}
    )
    """The content of a config.json. `model_type` names the architecture; missing keys have transformers' defaults."""

    @model_validator(mode="after")
    def _one_source(self) -> PretrainedConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError(
                "model must contain exactly one of path (a local directory) and config (the content of a config.json)."
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('model.config must contain a model_type, for example {"model_type": "llama"}.')
        return self


class HuggingFaceConfig(PretrainedConfig):
    """A causal language model from a local directory, with its weights, or from a config, with random weights."""

    seq_len: int = Field(256, ge=1, le=1 << 22)
    """Tokens per sample."""
    lora: LoraConfig | None = None
    """Adapters, by the library peft. Null: the whole model is trained."""


class PreferenceLoss(StrEnum):
    """What is minimised over the margin between a chosen and a rejected answer."""

    SIGMOID = "sigmoid"
    """Direct preference optimization (Rafailov et al. 2023)."""
    IPO = "ipo"
    """Identity preference optimization (Azar et al. 2023), over the mean log probability of an answer's tokens."""
    HINGE = "hinge"
    """Sequence likelihood calibration (Zhao et al. 2023)."""


class DpoConfig(Frozen):
    """How preferences become a loss. The reference model is the one in model.path."""

    loss: PreferenceLoss = PreferenceLoss.SIGMOID
    """"sigmoid" (Rafailov et al. 2023), "ipo" (Azar et al. 2023) over the mean log probability of an answer's tokens,
    or "hinge" (Zhao et al. 2023)."""
    beta: float = Field(0.1, gt=0, le=1e3)
    """How close the model stays to the reference; larger is closer."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that chosen and rejected are exchanged in a line (Mitchell 2023). Only with the loss "sigmoid"."""

    @model_validator(mode="after")
    def _smooths(self) -> DpoConfig:
        if self.label_smoothing and self.loss is not PreferenceLoss.SIGMOID:
            raise ValueError(
                f"model.dpo.label_smoothing is {self.label_smoothing}, and model.dpo.loss {str(self.loss)!r} has none. "
                'Set it to 0, or the loss to "sigmoid".'
            )
        return self


class PreferenceModelConfig(HuggingFaceConfig):
    """A causal language model that is trained on preferences."""

    dpo: DpoConfig = DpoConfig()
    """How preferences become a loss."""

    @property
    def has_reference(self) -> bool:
        """Whether the reference is a second model. With adapters it is the model without them."""
        return self.lora is None

    @model_validator(mode="after")
    def _begins_somewhere(self) -> PreferenceModelConfig:
        if self.config is not None and self.lora is None:
            raise ValueError(
                "model.config draws random weights, and preferences need a model that gives answers already: name its "
                "directory in model.path."
            )
        return self


def hugging_face_of(task: str, model: dict[str, Any]) -> HuggingFaceConfig | None:
    """Settings of a causal language model of transformers; None for another task, and for invalid settings, which the
    submit check refuses."""
    if task not in HF_TASKS:
        return None
    try:
        return (PreferenceModelConfig if task == DPO_TASK else HuggingFaceConfig).model_validate(model)
    except ValidationError:
        return None


def sizes_of(settings: HuggingFaceConfig) -> Sizes | None:
    """Sizes of the model; None: its config cannot be read here or lacks a size, its type is no family, or it is
    quantized."""
    return sizes_in(config_of(settings))


def config_of(settings: PretrainedConfig) -> dict[str, Any]:
    """The content of the model's config.json; {} if it cannot be read here."""
    return settings.config if settings.config is not None else read_config(settings.path or "")


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
    """Whether the model's directory is on this machine and has no tokenizer that can be read."""
    if settings.path is None:
        return False
    directory = Path(settings.path).expanduser()
    return (directory / CONFIG_NAME).is_file() and not (directory / TOKENIZER_NAME).is_file()


def slow_tokenizer_of(settings: PretrainedConfig) -> tuple[str, ...]:
    """Names of the tokenizer files in the model's directory whose format Shoal does not read."""
    directory = Path(settings.path or "").expanduser()
    return tuple(name for name in SLOW_TOKENIZER_NAMES if settings.path and (directory / name).is_file())


def architecture_of(settings: PretrainedConfig) -> str:
    """`model_type` of the config; empty if the config cannot be read here."""
    return str(config_of(settings).get("model_type", ""))


OF_OTHER_HEADS = frozenset({"classifier_dropout", "summary_first_dropout", "summary_last_dropout"})
"""Dropouts in a config that a causal language model does not have."""


_DROPOUTS = ("dropout", "pdrop", "drop_path", "layerdrop")


def dropout_of(settings: PretrainedConfig) -> tuple[str, float] | None:
    """Key and value of the first dropout of the model that is larger than 0; None: there is none."""
    config, architecture = config_of(settings), architecture_of(settings)
    if isinstance(settings, HuggingFaceConfig):
        if settings.lora is not None and settings.lora.dropout:
            return "lora.dropout", settings.lora.dropout
        defaults = FAMILIES[architecture].dropouts if architecture in FAMILIES else {}
        others = OF_OTHER_HEADS
    else:
        defaults, others = DROPOUTS_OF_ENCODERS.get(architecture, {}), frozenset()
    values = {**defaults, **config}
    found = (
        (key, value)
        for key, value in values.items()
        if any(word in key for word in _DROPOUTS) and key not in others and isinstance(value, int | float)
    )
    return next((one for one in found if one[1] > 0), None)


def plan_of_hugging_face(settings: HuggingFaceConfig) -> ParallelPlan | None:
    """The plan of a Hugging Face model; None: the model is not known, and runs on the data axes only.

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
    experts = f"{block}mlp.experts" if sizes.num_experts and sizes.num_dense_layers < sizes.num_hidden_layers else ""
    tensor = {} if "tp" in family.without else _tensor_of_family(settings, sizes, block, (embedding, head))
    if _has_reference(settings):
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


def _tensor_of_family(
    settings: HuggingFaceConfig, sizes: Sizes, block: str, ends: tuple[str, str]
) -> dict[str, TensorStyle]:
    family = sizes.family
    column, row = list(family.column), list(family.row)
    if sizes.num_dense_layers:
        column += family.dense_column
        row += family.dense_row
    if family.mixture is not None and family.mixture.shared and sizes.num_dense_layers < sizes.num_hidden_layers:
        column += [f"{family.mixture.shared}.{name}" for name in ("gate_proj", "up_proj")]
        row.append(f"{family.mixture.shared}.down_proj")
    styles: dict[str, TensorStyle] = {}
    for name in column:
        styles |= _with_adapter(f"{block}{name}", TensorStyle.COLUMN, settings)
    for name in row:
        styles |= _with_adapter(f"{block}{name}", TensorStyle.ROW, settings)
    if not family.partial_if or config_of(settings).get(family.partial_if):
        styles |= {f"{block}{name}": TensorStyle.PARTIAL for name in family.partial}
    return styles | {ends[0]: TensorStyle.EMBEDDING, ends[1]: TensorStyle.HEAD}


def _with_adapter(module: str, style: TensorStyle, settings: HuggingFaceConfig) -> dict[str, TensorStyle]:
    """The styles of a layer, or of its parts if it has an adapter: the part whose split dim is the layer's own is split
    in the same way; the other part has the rank as that dim, and is whole."""
    if settings.lora is None or not is_adapted(module, settings.lora, architecture_of(settings)):
        return {module: style}
    split = "lora_B" if style is TensorStyle.COLUMN else "lora_A"
    return {f"{module}.base_layer": style, f"{module}.{split}.default": style}


def isolates_packed(model_type: str) -> bool:
    """Whether it is known that examples in one sample do not see each other where positions begin anew."""
    family = FAMILIES.get(model_type)
    return family is not None and family.isolates_packed


def is_adapted(linear: str, lora: LoraConfig, model_type: str) -> bool:
    """Whether a linear layer of the blocks, by its name, gets an adapter. Names match as in peft."""
    if lora.target_modules == "all-linear":
        return linear.rpartition(".")[2] not in taken_for_experts(model_type)
    return any(f".{linear}".endswith(f".{target}") for target in lora.target_modules)


def taken_for_experts(model_type: str) -> frozenset[str]:
    """Layers that get no adapter; empty for a model without experts, and for a type that is no family."""
    family = FAMILIES.get(model_type)
    return TAKEN_FOR_EXPERTS if family is not None and family.mixture is not None else frozenset()


def _widths_of_family(sizes: Sizes) -> dict[str, int]:
    """Sizes that tp must divide, besides the heads."""
    widths = {"intermediate_size": sizes.intermediate_size} if sizes.num_dense_layers else {}
    mixture = sizes.family.mixture
    if mixture is not None and mixture.shared and sizes.num_dense_layers < sizes.num_hidden_layers:
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
    found = {"cp": "attention is no module in the models of transformers, so the tokens cannot be cut around it"}
    if config.get("output_router_logits"):
        found["pp"] = (
            "output_router_logits adds a loss of the routers of all blocks, and a stage has some of them only; "
            "without it the model can be split into stages"
        )
    if _has_reference(settings):
        found["pp"] = "a pipeline goes through one model, and the reference is a second one; with model.lora it is none"
    if family.mixture is None:
        found["ep"] = "it has no experts"
    return {**found, **family.without}


def _has_reference(settings: PretrainedConfig) -> bool:
    return isinstance(settings, PreferenceModelConfig) and settings.has_reference


def axes_of_family(settings: PretrainedConfig) -> tuple[str, ...]:
    """The axes that a layout of the model may have."""
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
    """Settings of the built-in model with the same sizes, to predict memory and time; None: the sizes are not known, or
    the model has parts that the built-in one has not (experts that tp leaves whole, latent attention, adapters, a
    reference)."""
    sizes = sizes_of(settings)
    if sizes is None or sizes.num_experts or sizes.family.has_latent_attention or settings.lora is not None:
        return None
    if isinstance(settings, PreferenceModelConfig):
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


_NUM_NAMED = 3


class ModelShape(OfTask):
    """Tensors of the whole model, before it is split over ranks."""

    tensors: dict[str, str]
    """Type and size of each tensor by its name, for example "float32 [64, 12]"."""


def difference(trained: ModelShape, other: ModelShape) -> str:
    """How the tensors of `other` differ from those of `trained`, in words; empty: they do not."""
    found = [
        _words(name, trained.tensors.get(name), other.tensors.get(name))
        for name in {**trained.tensors, **other.tensors}
        if trained.tensors.get(name) != other.tensors.get(name)
    ]
    if not found:
        return ""
    more = f"; and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    return f"its model does not fit the state of the one that trains: {'; '.join(found[:_NUM_NAMED])}{more}"


def _words(name: str, trained: str | None, other: str | None) -> str:
    if other is None:
        return f"{name} ({trained}) is gone"
    if trained is None:
        return f"{name} ({other}) is new"
    return f"{name} is {other} and was {trained}"
