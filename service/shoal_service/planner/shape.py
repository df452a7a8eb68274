"""ModelShape: what the planner needs of a model, parameters, arithmetic and activations of each kind of block.

It is made from the settings of the built-in language model, or from the sizes in the config.json of a known family of
transformers, without torch. The counts follow the modules of `shoal_workers.tasks.transformer`, tensor by tensor;
`_saved` lists what autograd saves of a block. In families with experts tp leaves experts whole, and latent attention
(DeepSeek), so their operations are not divided by tp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_service.planner.parameter_state import list_latent_layers
from shoal_workers.contract.families import Sizes
from shoal_workers.contract.hugging_face import HuggingFaceConfig, hugging_face_of
from shoal_workers.contract.hugging_face_plan import as_language_model, sizes_of
from shoal_workers.contract.language_model import LanguageModelConfig, expert_dim, feed_forward_dim, num_expert_layers
from shoal_workers.contract.spec import JobSpec, language_model_of
from shoal_workers.contract.text_data import BYTE_TOKENIZER, BYTE_VOCABULARY

_TOKENIZER_VOCABULARY = 65_536
"""Assumed for a tokenizer file, which the planner cannot read, if model.vocab_size is not set."""


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Numbers that autograd saves for the backward pass per token, by how they are stored and split.

    `split` are divided by tp, `whole` are not (the gathered inputs of column layers); both have the compute dtype.
    `split_fp32` are divided by tp and always 4 bytes (inputs of norms).
    """

    split: int
    whole: int
    split_fp32: int = 0
    whole_fp32: int = 0
    whole_cast: int = 0
    """4 bytes each, if the compute dtype is shorter. Otherwise it is the same tensor."""
    residual: int = 0
    """The block's input, in the compute dtype, divided as the activations between blocks are."""
    routed: int = 0
    """Copies of each token that go to experts, and what experts keep of them, in the compute dtype. Every tp rank has
    them, unless it sends its own tokens only."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: tokens x inputs by inputs x outputs."""

    inputs: int
    outputs: int
    split: str = ""
    """What tp divides: "outputs" of a column layer, "inputs" of a row layer, "" nothing."""
    count: int = 1
    is_routed: bool = False
    """There is one for each routed expert, with the tokens that it gets."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """One kind of block."""

    split_params: int
    """Divided by tp: attention, dense feed-forward, shared experts."""
    whole_params: int
    """Parameters that every tp rank has: norms and router."""
    expert_params: int
    """All routed experts; divided by ep and tp."""
    dense_flops: float
    """Operations per token, forward: 2 for each parameter of a matrix product, without routed experts."""
    expert_flops: float
    """Operations per token, forward, in top_k routed experts."""
    attention_flops: float
    """Operations per token, forward: the scores and their product with the values, causal half."""
    saved: SavedTensors
    saved_selective: SavedTensors
    saved_full: SavedTensors
    products: tuple[Product, ...] = ()
    width: int = 0
    """Width of the feed-forward layer of a token: of all experts that it goes to."""
    attended: int = 0
    """Numbers per token that attention returns."""
    whole_flops: float = 0.0
    """Operations per token, forward, that every tp rank does for all tokens."""

    @property
    def params(self) -> int:
        return self.split_params + self.whole_params + self.expert_params

    @property
    def flops(self) -> float:
        """Operations per token, forward, on all tp ranks together, what they repeat counted once."""
        return self.dense_flops + self.whole_flops + self.expert_flops + self.attention_flops


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: `num_dense` blocks, then `num_moe` blocks with experts."""

    dim: int
    seq_len: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_dense: int
    num_moe: int
    dense: BlockShape
    moe: BlockShape
    narrowest: int
    """Smallest width of a dense matrix product that tp splits."""
    num_experts: int
    top_k: int
    expert_width: int
    tied: bool
    experts_are_whole: bool = False
    """tp splits no expert: every tp rank computes all tokens of its experts."""
    attention_is_whole: bool = False
    window: int = 0
    """Tokens that a token sees in blocks with a sliding window."""
    windowed: float = 0.0
    """Share of the blocks whose sliding window is shorter than a sequence."""

    @property
    def has_shared_experts(self) -> bool:
        return self.moe.width > self.top_k * self.expert_width

    @property
    def num_blocks(self) -> int:
        return self.num_dense + self.num_moe

    @property
    def table_params(self) -> int:
        """Parameters of the embedding; an untied head has as many."""
        return self.vocab_size * self.dim

    @property
    def params(self) -> int:
        blocks = self.num_dense * self.dense.params + self.num_moe * self.moe.params
        return blocks + self.table_params * (1 if self.tied else 2) + self.dim

    @property
    def active_params(self) -> int:
        """Parameters that one token uses."""
        idle = self.num_moe * self.moe.expert_params * (1 - self.top_k / self.num_experts) if self.num_moe else 0
        return round(self.params - idle)

    @property
    def head_flops(self) -> float:
        """Operations per token, forward."""
        return 2.0 * self.table_params

    @property
    def flops_per_token(self) -> float:
        """Forward and backward without recomputation, as MFU counts it (Chowdhery et al. 2022, appendix B)."""
        blocks = self.num_dense * self.dense.flops + self.num_moe * self.moe.flops
        return 3 * (self.head_flops + blocks)


def shape_of(spec: JobSpec) -> ModelShape | None:
    """None for a user task, whose sizes are unknown until its model is built, and for a script or a loop."""
    if spec.program is not None:
        return None
    config = language_model_of(spec)
    if (hugging_face := hugging_face_of(spec.task, spec.model)) is not None:
        # The small matrices of adapters are not part of the shape; `parameter_state` counts them.
        config = as_language_model(hugging_face.model_copy(update={"lora": None}))
        if config is None:
            return _shape_of_family(hugging_face, on_gpu=spec.worker.gpus > 0)
        return _with_window(shape_of_language_model(config, on_gpu=spec.worker.gpus > 0), sizes_of(hugging_face))
    if config is None:
        return None
    tokenizer = spec.data.get("tokenizer", BYTE_TOKENIZER)
    vocab_size = BYTE_VOCABULARY if tokenizer == BYTE_TOKENIZER else _TOKENIZER_VOCABULARY
    return shape_of_language_model(config, vocab_size, on_gpu=spec.worker.gpus > 0)


def shape_of_language_model(
    config: LanguageModelConfig, vocab_size: int = BYTE_VOCABULARY, *, on_gpu: bool = False
) -> ModelShape:
    """`vocab_size`: of the tokenizer; model.vocab_size takes precedence. `on_gpu`: fused norms save less."""
    head_dim = config.head_dim or config.dim // config.num_heads
    num_moe = num_expert_layers(config)
    widths = [config.num_heads * head_dim]
    if num_moe < config.num_layers:
        widths.append(feed_forward_dim(config))
    if num_moe and config.num_shared_experts:
        widths.append(config.num_shared_experts * expert_dim(config))
    return ModelShape(
        dim=config.dim,
        seq_len=config.seq_len,
        vocab_size=config.vocab_size or vocab_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads or config.num_heads,
        head_dim=head_dim,
        num_dense=config.num_layers - num_moe,
        num_moe=num_moe,
        dense=_block(config, head_dim, on_gpu, has_experts=False),
        moe=_block(config, head_dim, on_gpu, has_experts=True),
        narrowest=min(widths),
        num_experts=config.num_experts,
        top_k=config.top_k,
        expert_width=expert_dim(config),
        tied=config.tied_head,
    )


def _block(config: LanguageModelConfig, head_dim: int, on_gpu: bool, *, has_experts: bool) -> BlockShape:
    dim = config.dim
    queries = config.num_heads * head_dim
    keys = (config.num_kv_heads or config.num_heads) * head_dim
    attention = 2 * dim * queries + 2 * dim * keys
    expert = expert_dim(config)
    dense = config.num_shared_experts * expert if has_experts else feed_forward_dim(config)
    router = dim * config.num_experts if has_experts else 0
    split = attention + 3 * dim * dense
    return BlockShape(
        split_params=split,
        whole_params=2 * dim + router,
        expert_params=3 * dim * expert * config.num_experts if has_experts else 0,
        dense_flops=2.0 * (split + router),
        expert_flops=2.0 * 3 * dim * expert * config.top_k if has_experts else 0.0,
        attention_flops=2.0 * config.seq_len * queries,
        saved=_saved(config, queries, keys, dense, has_experts=has_experts, is_fused=on_gpu),
        saved_selective=_saved_selective(config, queries, keys, dense, has_experts=has_experts),
        saved_full=SavedTensors(split=0, whole=0, residual=dim),
        products=_products(config, queries, keys, dense, has_experts=has_experts),
        width=dense + (config.top_k * expert if has_experts else 0),
        attended=queries,
    )


def _products(
    config: LanguageModelConfig, queries: int, keys: int, dense: int, *, has_experts: bool
) -> tuple[Product, ...]:
    dim, expert = config.dim, expert_dim(config)
    products = [
        Product(dim, queries, "outputs"),
        Product(dim, keys, "outputs", count=2),
        Product(queries, dim, "inputs"),
    ]
    if dense:
        products += [Product(dim, dense, "outputs", count=2), Product(dense, dim, "inputs")]
    if has_experts:
        routed = (Product(dim, expert, "outputs", 2, is_routed=True), Product(expert, dim, "inputs", is_routed=True))
        products += [Product(dim, config.num_experts), *routed]
    return tuple(products)


def _saved(
    config: LanguageModelConfig, queries: int, keys: int, dense: int, *, has_experts: bool, is_fused: bool
) -> SavedTensors:
    """Without recomputation; tests/dist/parallel/test_saved_activations.py counts what autograd really saves.

    attention: the norm's input (fp32; without a fused kernel also its normalised one); its output, which query, key
    and value share; rotated queries and keys; values; what attention returns, and, where its kernel returns heads
    first, the copy that `out` reads. Feed-forward: the norm's input; its output, which gate and up share; gate,
    silu(gate), up, and their product.
    Experts: the router's input in fp32 and its scores; the copies of each token that go in, what comes out, sorted and
    unsorted; and the same four of a SwiGLU for each copy.
    """
    norms, results = (2, 1) if is_fused else (4, 2)
    split, whole = (1 + results) * queries + 2 * keys + 4 * dense, 2 * config.dim
    routed, whole_fp32, whole_cast = 0, 0, 0
    if has_experts:
        split += 4 * config.top_k * expert_dim(config)
        routed = 3 * config.top_k * config.dim
        whole_fp32, whole_cast = config.num_experts, config.dim
    fp32 = {"split_fp32": norms * config.dim, "whole_fp32": whole_fp32, "whole_cast": whole_cast}
    return SavedTensors(split, whole, **fp32, routed=routed)


def _saved_selective(
    config: LanguageModelConfig, queries: int, keys: int, dense: int, *, has_experts: bool
) -> SavedTensors:
    """The block's input, what attention returns, and the output of every matrix product."""
    split, routed = 2 * queries + 2 * keys + 2 * dense, 0
    if has_experts:
        split += 2 * config.top_k * expert_dim(config)
        routed = config.top_k * config.dim
    return SavedTensors(split=split, whole=2 * config.dim, residual=config.dim, routed=routed)


def _shape_of_family(settings: HuggingFaceConfig, *, on_gpu: bool) -> ModelShape | None:
    """The shape of a model with experts or latent attention: that of the built-in model of nearly the same sizes, with
    the parts that differ. None if the config lacks a size.

    Not counted: biases, and norms of heads."""
    sizes = sizes_of(settings)
    if sizes is None or (sizes.num_experts and not (sizes.expert_width and sizes.top_k)):
        return None
    if sizes.family.has_latent_attention and not (sizes.kv_lora_rank and sizes.v_head_dim):
        return None
    num_moe = sizes.num_hidden_layers - sizes.num_dense_layers
    latent = sizes.family.has_latent_attention
    near = LanguageModelConfig(
        dim=sizes.hidden_size,
        num_layers=sizes.num_hidden_layers,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=None if latent else sizes.num_key_value_heads,
        head_dim=_even_head_dim(sizes),
        hidden_dim=sizes.intermediate_size,
        seq_len=settings.seq_len,
        vocab_size=max(2, sizes.vocab_size),
        tied_head=sizes.tie_word_embeddings,
        num_experts=sizes.num_experts,
        top_k=max(1, sizes.top_k),
        num_shared_experts=0,
        expert_hidden_dim=sizes.expert_width or None,
        num_dense_layers=sizes.num_dense_layers,
    )
    shape = shape_of_language_model(near, on_gpu=on_gpu)
    moe = shape.moe
    if num_moe:
        shared = 3 * sizes.hidden_size * sizes.shared_width
        saved, selective = _with_whole_experts(moe.saved, near, 4), _with_whole_experts(moe.saved_selective, near, 2)
        whole = tuple(replace(product, split="") if product.is_routed else product for product in moe.products)
        columns = (Product(sizes.hidden_size, sizes.shared_width, "outputs", count=2),)
        rows = (Product(sizes.shared_width, sizes.hidden_size, "inputs"),)
        moe = replace(
            moe,
            products=whole + (columns + rows) * bool(sizes.shared_width),
            width=moe.width + sizes.shared_width,
            split_params=moe.split_params + shared,
            dense_flops=moe.dense_flops + 2.0 * shared,
            expert_flops=moe.expert_flops,
            saved=replace(saved, split=saved.split + 4 * sizes.shared_width),
            saved_selective=replace(selective, split=selective.split + 2 * sizes.shared_width),
        )
    shape = replace(shape, moe=moe, experts_are_whole=True)
    if not latent:
        return _with_window(shape, sizes)
    dense = _with_latent_attention(shape.dense, sizes, on_gpu=on_gpu)
    return replace(
        shape, dense=dense, moe=_with_latent_attention(shape.moe, sizes, on_gpu=on_gpu), attention_is_whole=True
    )


def _with_window(shape: ModelShape, sizes: Sizes | None) -> ModelShape:
    """The shape with the sliding window of the config, if sequences are longer."""
    if sizes is None or not sizes.sliding_window or sizes.sliding_window >= shape.seq_len:
        return shape
    return replace(shape, window=sizes.sliding_window, windowed=sizes.num_windowed_layers / shape.num_blocks)


def _even_head_dim(sizes: Sizes) -> int:
    head_dim = sizes.head_dim or max(2, sizes.hidden_size // sizes.num_attention_heads)
    return head_dim + head_dim % 2


def _with_whole_experts(saved: SavedTensors, config: LanguageModelConfig, copies: int) -> SavedTensors:
    inside = copies * config.top_k * expert_dim(config)
    return replace(saved, split=saved.split - inside, routed=saved.routed + inside)


def _with_latent_attention(block: BlockShape, sizes: Sizes, *, on_gpu: bool) -> BlockShape:
    """The block with latent attention (DeepSeek-AI 2024) in place of its own, whole on every tp rank."""
    dim, heads = sizes.hidden_size, sizes.num_attention_heads
    old = heads * _even_head_dim(sizes)
    layers = list_latent_layers(sizes).values()
    latent = sum(inputs * outputs for inputs, outputs in layers)
    keys, values = heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim), heads * sizes.v_head_dim
    narrow = 2 * (sizes.kv_lora_rank + (sizes.q_lora_rank or 0)) + sizes.qk_rope_head_dim
    results = 1 if on_gpu else 2  # as in `_saved`
    saved = replace(
        block.saved,
        split=block.saved.split - (3 + results) * old,
        whole=block.saved.whole + 2 * keys + (1 + results) * values + narrow,
    )
    selective = replace(
        block.saved_selective,
        split=block.saved_selective.split - 4 * old,
        whole=block.saved_selective.whole + 2 * (keys + values) + narrow // 2,
    )
    return replace(
        block,
        split_params=block.split_params - 4 * dim * old,
        whole_params=block.whole_params + latent + sizes.kv_lora_rank + (sizes.q_lora_rank or 0),
        dense_flops=block.dense_flops - 2.0 * 4 * dim * old,
        whole_flops=2.0 * latent,
        products=tuple(Product(*layer) for layer in layers) + block.products[3:],
        attention_flops=block.attention_flops / (2 * old) * (keys + values),
        saved=saved,
        saved_selective=selective,
    )
