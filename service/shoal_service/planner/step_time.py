"""Seconds of one optimizer step, by what they are spent on; columns in, columns out. `ranking` calls `step_time`.

A micro-batch on the slowest pipeline rank takes

    t = compute + recompute + tp + cp + ep + pp + dp (gathered and reduced for each micro-batch)

and a step takes

    fed x t + bubble + dp (gathered and reduced once) + update + overhead

of which (fed - num_micro_batches / data ranks) x t is padding, from the uneven partition and from the pipeline.

Communication along tp, cp and ep delays the computation. Communication along pp and the data axes overlaps with it by
the share `overlap` of the profile, and by no more than the time of the computation.

Computing is matrix products, attention and elementwise operations. On a GPU a product of M x N x K is cut into tiles.
Each multiprocessor computes one tile at a time, so the time is that of whole waves of tiles. A finished tile is written
at memory bandwidth, which takes as long as rate / bandwidth more terms of its inner dimension (CUTLASS, "Efficient GEMM
in CUDA"; NVIDIA's guide "Matrix Multiplication Background", wave quantization). The rate of large products is measured
(`gpus`). For hardware without a known number of multiprocessors one formula holds for all shapes, by the narrowest
side.

Layouts with equal tp, cp and ep have the same times of blocks, so each combination is computed once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from shoal_service.core.hardware_profile import NARROW_HEAD_SHARE, WIDE_HEAD, HardwareProfile
from shoal_service.planner.candidates import CONTEXTS, LEVELS, RECOMPUTES, Candidates, Floats, Ints
from shoal_service.planner.memory import ContentColumns, Work, content_columns, key_copies, rank_params, saved_bytes
from shoal_service.planner.network import Group, Network, send_s
from shoal_service.planner.parameter_state import PerParameter
from shoal_service.planner.shape import BlockShape, ModelShape, Product
from shoal_service.planner.stack import AttentionKernel, Stack
from shoal_workers.contract.layout import ContextMethod, Recompute, Schedule, ShardLevel
from shoal_workers.contract.spec import Precision

_FP32, _FP8 = 4, 1
_UPDATE_BYTES = 20
"""Bytes moved for a trained parameter by clipping and the update, besides its state: parameter, gradient and a
temporary are read or written."""
_SENT_BYTES = {Precision.BF16: 2.0, Precision.FP16: 2.0, "int8": 1 + 4 / 128}
"""Bytes of a gradient that is sent in another type than the stack's; as int8, 128 of them share a scale."""
_ROUND_BYTES = 80
"""Bytes moved to round a gradient at random to a multiple of its block's scale, and to read and add up what others have
rounded: each operation of `engine/group/rounded_sums.py` reads and writes its numbers."""
_STATE_PASSES = 3
"""An update reads and writes its state, and reads it again: 44 bytes in all for AdamW's two moments."""


class SecondsPart(StrEnum):
    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    TP = "tp"
    CP = "cp"
    EP = "ep"
    PP = "pp"
    DP = "dp"
    BUBBLE = "bubble"
    PADDING = "padding"
    UPDATE = "update"
    OVERHEAD = "overhead"


def step_time(
    shape: ModelShape, work: Work, precision: Precision, network: Network, columns: Candidates
) -> tuple[Floats, dict[SecondsPart, Floats], dict[SecondsPart, Floats]]:
    """Seconds of a step, their parts, which add up to them, and what runs beside computation, of the axes that hide."""
    profile, sharing = network.profile, network.sharing
    content = content_columns(columns, "slowest")
    each, once = _micro_batch(shape, work, precision, network, columns, content)
    if (columns.pp > 2).any():
        inner, inner_once = _micro_batch(shape, work, precision, network, columns, content_columns(columns, "inner"))
        is_inner = sum(inner.values()) > sum(each.values())
        each = {part: np.where(is_inner, inner[part], seconds) for part, seconds in each.items()}
        once = _Data(*(np.where(is_inner, a, b) for a, b in zip(inner_once, once, strict=True)))
    micro_batch_s = np.sum(list(each.values()), axis=0)
    share = work.num_micro_batches / (columns.dp_replicate * columns.dp_shard)
    bubble = _bubble(columns, micro_batch_s)
    dense, experts = rank_params(shape, columns, content)
    of_dense, of_experts = work.param_state.dense, work.param_state.experts
    update_bytes = dense / columns.shards * _update_bytes(of_dense)
    update_bytes = update_bytes + experts / columns.expert_shards * _update_bytes(of_experts)
    update = update_bytes / (profile.host_bandwidth if columns.offload else profile.memory_bandwidth) * sharing
    overhead = np.full(len(columns), profile.step_overhead_s) * sharing
    parts = {part: share * seconds for part, seconds in each.items()}
    parts[SecondsPart.DP] = parts[SecondsPart.DP] + once.once
    parts |= {
        SecondsPart.BUBBLE: bubble,
        SecondsPart.PADDING: (columns.fed - share) * micro_batch_s,
        SecondsPart.UPDATE: update,
        SecondsPart.OVERHEAD: overhead,
    }
    hidden = {
        SecondsPart.PP: parts[SecondsPart.PP] * _hidden_messages(work, profile),
        SecondsPart.DP: share * once.hidden_each + once.hidden_once,
    }
    return np.sum(list(parts.values()), axis=0), parts, hidden


def _micro_batch(
    shape: ModelShape,
    work: Work,
    precision: Precision,
    network: Network,
    columns: Candidates,
    content: ContentColumns,
) -> tuple[dict[SecondsPart, Floats], _Data]:
    """Return the seconds of one micro-batch on a rank with this content, and those of its data axes."""
    passes = compute_s(shape, work, precision, network.profile, columns, content)
    compute = network.sharing * (passes.forward + passes.backward)
    data = _data(shape, work, network, columns, content, compute)
    return {
        SecondsPart.COMPUTE: compute,
        SecondsPart.RECOMPUTE: network.sharing * passes.recompute,
        SecondsPart.TP: _tensor(shape, work, network, columns, content),
        SecondsPart.CP: _context(shape, work, network, columns, content),
        SecondsPart.EP: _experts(shape, work, network, columns, content),
        SecondsPart.PP: _pipeline(shape, work, network, columns, content),
        SecondsPart.DP: data.each,
    }, data


def _update_bytes(term: PerParameter) -> float:
    return _UPDATE_BYTES * term.trained_share + _STATE_PASSES * term.state_bytes


def _tokens(shape: ModelShape, work: Work, columns: Candidates) -> Floats:
    """Tokens of one micro-batch in one tp group."""
    return work.micro_size * shape.seq_len / columns.cp


def _tensor(shape: ModelShape, work: Work, network: Network, columns: Candidates, content: ContentColumns) -> Floats:
    """Sequence parallel (Korthikanti et al. 2022): a gather before and a reduce-scatter after attention and the
    feed-forward layer, in both passes. Recomputation repeats those of the forward pass; selective, only the gathers.

    Without sequence parallelism each pair is one all-reduce, which takes as long. In the backward pass, what precedes a
    column layer can run beside the matrix product for the gradient of its weights, half of it.

    Experts that tp does not split need neither. Ranks that share a key and value head gather the queries, keys and
    values of all (Megatron Core, transformer/attention.py)."""
    tensor_group, stack, tokens = network.group(network.spans.of_axis["tp"]), work.stack, _tokens(shape, work, columns)
    size = (work.compute_bytes + _FP8) / 2 if stack.gathers_fp8 else work.compute_bytes  # only gathers are in fp8
    gather_s = tensor_group.gather_s(tokens * shape.dim * size)
    if stack.sums_after_exchange and stack.is_sequence_parallel:
        copies = _SUM_COPIES + _BATCH_COPIES * (work.micro_size > 1)
        copied_s = copies * tokens * shape.dim * size / network.profile.memory_bandwidth * network.sharing
        gather_s = gather_s + np.where(columns.tp > 1, copied_s, 0.0)
    again = 2.0 * (stack.gathers_again and stack.is_sequence_parallel)
    hidden = network.profile.overlap * stack.hides_tensor
    backward = 4 + again - hidden * (2 + again)
    times = {Recompute.NONE: 4 + backward, Recompute.SELECTIVE: 6 - again + backward, Recompute.FULL: 8 + backward}
    per_block = np.choose(columns.recompute, [np.full(len(columns), times[mode]) for mode in RECOMPUTES])
    ends = 2 * (content.has_embedding + content.has_head)
    without_experts = content.num_moe * np.where(columns.folds_experts & (not shape.has_shared_experts), 0.5, 1.0)
    seconds: Floats = gather_s * ((content.num_dense + without_experts) * per_block + ends)
    shares_heads = (columns.tp > shape.num_kv_heads) & (not shape.attention_is_whole)
    if not shares_heads.any():
        return seconds
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    shared_s = _passes(columns) * tensor_group.gather_s(tokens * heads * work.compute_bytes)
    return seconds + (content.num_dense + content.num_moe) * np.where(shares_heads, shared_s, 0.0)


def _passes(columns: Candidates) -> Floats:
    """Passes through a block that communicate: forward, backward and the recomputed one."""
    passes: Floats = np.where(columns.recompute == RECOMPUTES.index(Recompute.NONE), 2.0, 3.0)
    return passes


def _context(shape: ModelShape, work: Work, network: Network, columns: Candidates, content: ContentColumns) -> Floats:
    """Keys and values are gathered in the forward pass and their gradients reduced in the backward pass; or queries,
    keys, values and results are exchanged in both (Jacobs et al. 2023)."""
    context_group = network.group(network.spans.of_axis["cp"])
    size, tokens = work.compute_bytes, _tokens(shape, work, columns)
    split = 1 if shape.attention_is_whole else columns.tp
    num_heads = shape.num_heads if work.stack.repeats_keys else shape.num_kv_heads
    keys = 2 * num_heads * shape.head_dim / np.minimum(split, num_heads)
    gathered = tokens * columns.cp * keys * size
    exchanged = tokens * (2 * shape.num_heads * shape.head_dim / split + keys * key_copies(shape, columns)) * size
    copy_s = network.sharing / network.profile.memory_bandwidth
    gather = context_group.gather_s(gathered) + _GATHER_COPIES * gathered * copy_s
    exchange = 2 * context_group.exchange_s(exchanged / 2) + _EXCHANGE_COPIES * exchanged * copy_s
    collective_s: Floats = np.where(columns.context == CONTEXTS.index(ContextMethod.ULYSSES), exchange, gather)
    blocks: Ints = content.num_dense + content.num_moe
    seconds: Floats = np.where(columns.cp > 1, blocks * _passes(columns) * collective_s, 0.0)
    return seconds


def _experts(shape: ModelShape, work: Work, network: Network, columns: Candidates, content: ContentColumns) -> Floats:
    """Each token goes to top_k experts and comes back, in both passes."""
    expert_group, stack = network.group(network.spans.of_axis["ep"]), work.stack
    tokens = _tokens(shape, work, columns) / (columns.tp if stack.splits_routed_tokens else columns.token_parts)
    copies, crossing = _copies(shape, stack, expert_group)
    exchange_s = expert_group.exchange_s(tokens * copies * shape.dim * work.compute_bytes, crossing)
    return content.num_moe * 2 * _passes(columns) * exchange_s * (1 - stack.expert_overlap)


def _copies(shape: ModelShape, stack: Stack, expert_group: Group) -> tuple[Floats, Floats]:
    """Return the ranks that a token is sent to, and the share of them for which it crosses the network.

    Of n ranks or nodes, top_k experts at random are on n (1 - (1 - 1/n)^k) in the mean.
    """
    ranks, top_k = expert_group.size.astype(float), shape.top_k
    if not stack.dispatches_once:
        return np.full_like(ranks, top_k), np.ones_like(ranks)
    nodes = ranks / expert_group.span.per_node
    if stack.routes_in_order:
        copies = np.maximum(1.0, top_k * ranks / max(1, shape.num_experts))
        return copies, np.maximum(1.0, copies / expert_group.span.per_node) / copies
    copies = ranks * (1 - (1 - 1 / ranks) ** top_k)
    return copies, nodes * (1 - (1 - 1 / nodes) ** top_k) / copies


def _pipeline(shape: ModelShape, work: Work, network: Network, columns: Candidates, content: ContentColumns) -> Floats:
    """Activations to the next stage and gradients back, for each micro-batch. The first and the last stage have one
    neighbour only."""
    stack = work.stack
    num_bytes = _tokens(shape, work, columns) * shape.dim * work.compute_bytes
    num_bytes = num_bytes / (columns.tp if stack.scatters_messages else 1)
    message_s = send_s(network.profile, num_bytes, network.spans.of_axis["pp"].link)
    waits = 2 * (1 - network.profile.overlap) if stack.message_waits is None else stack.message_waits
    neighbours = 2 * columns.per_rank - content.has_embedding - content.has_head
    sends = waits / 2 * neighbours * message_s * network.sharing
    return np.where(columns.pp > 1, sends, 0.0)


def _hidden_messages(work: Work, profile: HardwareProfile) -> float:
    """Return what is hidden of the messages between stages, relative to what is not."""
    is_hidden = work.stack.message_waits is None and profile.overlap < 1
    return profile.overlap / (1 - profile.overlap) if is_hidden else 0.0


class _Data(NamedTuple):
    """Seconds of the data axes: of each micro-batch and once a step, and those that overlap with computation."""

    each: Floats
    once: Floats
    hidden_each: Floats
    hidden_once: Floats


def _data(
    shape: ModelShape,
    work: Work,
    network: Network,
    columns: Candidates,
    content: ContentColumns,
    compute: Floats,
) -> _Data:
    dense, experts = rank_params(shape, columns, content)
    profile, spans, shards = network.profile, network.spans, columns.shards
    dense_group, expert_group = network.group(spans.shards), network.group(spans.experts)
    replicas = network.group(spans.of_axis["dp_replicate"])
    units = content.num_dense + content.num_moe

    def moved(of_dense: Floats, of_experts: Floats, size: Floats | int) -> Floats:
        """Gather or reduce so many numbers of the rank."""
        cost = _in_units(dense_group, of_dense * size, units)
        return cost + np.where(of_experts > 0, _in_units(expert_group, of_experts * size, content.num_moe), 0.0)

    gather = moved(dense, experts, work.compute_bytes)
    trained_dense, trained_experts = (
        dense * work.param_state.dense.trained_share,
        experts * work.param_state.experts.trained_share,
    )
    is_plain = columns.level == LEVELS.index(ShardLevel.NONE)
    is_once = (columns.level == LEVELS.index(ShardLevel.OPTIMIZER)) | (columns.pp > 1)
    size, is_rounded = _SENT_BYTES.get(work.reduction, work.stack.gradient_bytes), work.reduction == "int8"
    # replicas round what they add up once in a step, else their shards do
    between = is_rounded & (is_plain | is_once | (shards == 1)) & (columns.dp_replicate > 1)
    within = is_rounded & (shards > 1) & ~between
    reduce = moved(trained_dense, trained_experts, np.where(between, work.stack.gradient_bytes, size))
    state = trained_dense / shards + trained_experts / columns.expert_shards
    round_s = _ROUND_BYTES / profile.memory_bandwidth * network.sharing
    reduce = reduce + (trained_dense + trained_experts) * within * round_s
    across = replicas.reduce_s(state * np.where(within, _FP32, size)) + state * between * round_s
    is_full = (columns.level == LEVELS.index(ShardLevel.FULL)) & (columns.pp == 1)
    reduces_once = [LEVELS.index(level) for level in (ShardLevel.OPTIMIZER, ShardLevel.NONE)]
    reduces_each = ~np.isin(columns.level, reduces_once) & ((columns.pp == 1) | work.stack.shards_in_pipeline)
    each = np.where(is_full, 2 * gather, 0.0) + np.where(reduces_each, reduce, 0.0)
    summed = (trained_dense + trained_experts) * _sum_bytes(work) / profile.memory_bandwidth * network.sharing
    summed = np.where(reduces_each | (columns.fed == 1) | work.stack.sums_in_product, 0.0, summed)
    reduce_once = (1 + work.stack.reduces_whole) * reduce
    once = np.where(is_full, 0.0, gather) + np.where(reduces_each, 0.0, reduce_once) + across
    if shape.tied:
        table_bytes = shape.table_params / columns.tp * work.param_state.dense.trained_share * work.stack.gradient_bytes
        tied_s = send_s(profile, table_bytes, spans.of_axis["pp"].link) * network.sharing
        once = once + np.where(columns.pp > 1, tied_s, 0.0)
    if columns.offload:
        once = once + 2 * state * _FP32 / profile.host_bandwidth
    hidden_each, hidden_once = (
        work.stack.hides_data * np.minimum(profile.overlap * communication, compute) for communication in (each, once)
    )
    return _Data(each - hidden_each + summed, once - hidden_once, hidden_each, hidden_once)


def _sum_bytes(work: Work) -> int:
    """Bytes moved to add a gradient of a micro-batch to their sum, which is read and written."""
    return work.compute_bytes + 2 * work.stack.summed_gradient_bytes


def _in_units(cut_group: Group, num_bytes: Floats, units: Ints) -> Floats:
    """One collective for each unit and one for the root; each has the latency once."""
    return cut_group.gather_s(num_bytes) + np.where(cut_group.size > 1, units * cut_group.latency_s, 0.0)


def _bubble(columns: Candidates, term: Floats) -> Floats:
    """Seconds for which the slowest rank waits while the pipeline fills and drains.

    GPipe and 1F1B: a micro-batch on each of the other ranks (Narayanan et al. 2021); interleaved: that, divided by the
    stages per rank.
    zbv: the gradients of weights fill the bubble if there are 2 pp - 1 micro-batches (Qi et al. 2024); for unequal
    passes a sixth of the bubble of 1F1B is assumed to be left.
    dualpipev: (pp - 1) x 2/9 (DeepSeek-AI 2024, table 2, with B = 2 F and W = F).
    With recomputation the engine does not split the backward pass, so the last two have the bubble of interleaved.
    """
    pp = columns.pp
    is_full = (columns.recompute == RECOMPUTES.index(Recompute.FULL)).astype(int)
    evenness = np.array([cut.evenness for cut in columns.cuts]).reshape(-1, 2)
    others = pp * evenness[columns.cut, is_full] - 1
    missing = np.maximum(0, 2 * pp - 1 - columns.fed) / 3
    share = np.select(
        [
            columns.is_schedule(Schedule.INTERLEAVED)
            | (columns.recompute != RECOMPUTES.index(Recompute.NONE))
            & columns.is_schedule(Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V),
            columns.is_schedule(Schedule.ZERO_BUBBLE_V),
            columns.is_schedule(Schedule.DUAL_PIPE_V),
        ],
        [others / columns.per_rank, np.minimum(others, others / 6 + missing), others * 2 / 9],
        others,
    )
    return np.where(pp > 1, share * term, 0.0)


_FP32_BYTES, _HALF = 4, 2
_TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7))
"""Rows and columns of a tile, and its rate relative to the largest tile: smaller tiles read more for each operation.
The rates are estimates."""
IMBALANCE = 1.1
"""Load of the busiest rank of experts relative to the mean, with a balanced router."""
_SPLIT_BACKWARD = 1.08
"""zbv and dualpipev run the backward pass in two halves, which cannot be compiled (torch 2.13)."""
_SUM_COPIES, _BATCH_COPIES = 0.5, 2
"""Times that a collective of tp reads or writes its tensor in memory, in the mean: every second one is a sum, which is
read; the tokens of several samples are put in order (workers/shoal_workers/engine/parallel/exchange.py)."""
_GATHER_COPIES, _EXCHANGE_COPIES = 8, 6
"""Times that cp reads or writes in memory, in each pass, what it gathers or exchanges: it puts tokens in order, and
adds up the gradients of both chunks of queries (workers/shoal_workers/engine/parallel/context.py)."""
_WINDOW_TILE = 128
"""Keys that attention computes at once: it skips whole tiles outside a sliding window (Dao 2023)."""
_BACKWARD_ATTENTION = 2.5
"""Operations of the backward pass of fused attention, which computes the scores again, relative to the forward pass."""
_SCORE_TRAFFIC = (13, 19)
"""Bytes moved for each attention score, forward and backward: products, softmax and dropout at 2 bytes, and the mask of
the dropout at 1; then their gradients."""
_CAST_BYTES = 6
"""Bytes moved to make a number fp8 with a dynamic scale: read for the largest, read again, written in both layouts
(pytorch/ao, float8_roofline.py)."""
_KERNEL_SPEED = {AttentionKernel.FLASH_1: 0.5}
"""Relative to FlashAttention-2, which is "around 2x" as fast as FlashAttention (Dao 2023)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one micro-batch on a rank."""

    forward: Floats
    backward: Floats
    recompute: Floats


@dataclass(frozen=True, slots=True)
class _BlockTimes:
    """Seconds of one block."""

    products: Floats
    """Matrix products of the forward pass."""
    inputs: Floats
    """Matrix products of the gradients of inputs."""
    weights: Floats
    """Matrix products of the gradients of weights."""
    attention: Floats
    attention_backward: Floats
    rest: Floats
    """Elementwise operations of the forward pass."""

    def __getitem__(self, index: Ints) -> _BlockTimes:
        return _BlockTimes(*(times[index] for times in self._columns()))

    def __add__(self, other: _BlockTimes) -> _BlockTimes:
        return _BlockTimes(*(a + b for a, b in zip(self._columns(), other._columns(), strict=True)))

    def times(self, number: Ints) -> _BlockTimes:
        return _BlockTimes(*(number * times for times in self._columns()))

    def _columns(self) -> tuple[Floats, ...]:
        return (self.products, self.inputs, self.weights, self.attention, self.attention_backward, self.rest)


@dataclass(frozen=True)
class _Degrees:
    """Distinct combinations of the degrees that split a block."""

    tp: Ints
    cp: Ints
    ep: Ints
    token_parts: Ints


def compute_s(
    shape: ModelShape,
    work: Work,
    precision: Precision,
    profile: HardwareProfile,
    columns: Candidates,
    content: ContentColumns,
) -> Pass:
    """Predict the seconds of one micro-batch for each layout of `columns`, with a processor for each rank."""
    base = int(columns.world_size.max(initial=1)) + 1
    keys = 2 * ((columns.tp * base + columns.cp) * base + columns.ep) + columns.folds_experts
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    degrees = _Degrees(columns.tp[first], columns.cp[first], columns.ep[first], columns.token_parts[first])
    rate = profile.peak_flops[precision] * profile.matmul_efficiency
    # of dense and of MoE blocks: number in the model, shape, number on a rank
    kinds = ((shape.num_dense, shape.dense, content.num_dense), (shape.num_moe, shape.moe, content.num_moe))
    block_times = [
        _block(shape, kind, work, precision, profile, degrees)[index].times(num_on_rank)
        for num_in_model, kind, num_on_rank in kinds
        if num_in_model
    ]
    times = block_times[0] + block_times[1] if len(block_times) > 1 else block_times[0]
    tokens = work.micro_size * shape.seq_len / degrees.cp
    width = np.ceil(shape.vocab_size / degrees.tp)
    head_s = _product(profile, rate, tokens, width, np.full_like(tokens, shape.dim), shape.narrowest / degrees.tp)
    head_s = head_s + tokens / degrees.tp * shape.vocab_size * 2 * _FP32_BYTES / profile.memory_bandwidth
    head = content.has_head * head_s[index]
    launch = (content.num_dense + content.num_moe) * (profile.block_overhead_s + work.stack.launch_s)
    forward = times.products + times.attention + times.rest + head + launch / 3
    backward = times.inputs + times.weights + times.attention_backward + 2 * times.rest
    backward = backward + (1 + work.param_state.dense.trained_share) * head + launch * 2 / 3
    is_split = columns.is_schedule(Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V) & (columns.pp > 1)
    backward = backward * np.where(is_split, _SPLIT_BACKWARD, 1.0)
    stack = work.stack
    computes_core_again = stack.attention is AttentionKernel.UNFUSED and not stack.keeps_scores
    core = np.zeros(len(columns)) + times.attention * computes_core_again
    selective = times.rest + (1 - stack.selective_share) * times.products
    by_mode = {
        Recompute.NONE: core,
        Recompute.SELECTIVE: core + selective,
        Recompute.FULL: times.products + times.attention + times.rest,
    }
    # the others wait for the first or the last stage if it is slower: then only its own devices matter
    is_end = content.has_embedding | content.has_head
    slowest = _slowest(columns.world_size // np.where(is_end, columns.pp, 1), profile)
    recompute = np.choose(columns.recompute, [by_mode[mode] for mode in RECOMPUTES])
    return Pass(slowest * forward, slowest * backward, slowest * recompute)


def _slowest(world_size: Ints, profile: HardwareProfile) -> Floats:
    """Return the time of the slowest device of a group relative to a typical one.

    It is the expected maximum of normally distributed times (Blom 1958).
    """
    worlds, index = np.unique(world_size, return_inverse=True)
    quantiles = [NormalDist().inv_cdf((size - 0.375) / (size + 0.25)) if size > 1 else 0.0 for size in worlds]
    return (1 + profile.spread * np.array(quantiles))[index.reshape(-1)]


def _block(
    shape: ModelShape, kind: BlockShape, work: Work, precision: Precision, profile: HardwareProfile, degrees: _Degrees
) -> _BlockTimes:
    tokens = work.micro_size * shape.seq_len / degrees.cp
    peak, stack, param_state = profile.peak_flops[precision], work.stack, work.param_state
    rate = peak * profile.matmul_efficiency
    forward, inputs, weights = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(tokens)
    for product in kind.products:
        m, n, k, groups, width = _sides(shape, product, degrees, tokens)
        count = product.count * (IMBALANCE if product.is_routed and not stack.routes_in_order else 1.0)
        trained = (param_state.experts if product.is_routed else param_state.dense).trained_share
        is_fp8 = stack.fp8 and not product.is_routed
        speed = rate * (profile.fp8_speed if is_fp8 else 1.0)
        casts = _CAST_BYTES * is_fp8 * groups / profile.memory_bandwidth
        # a tensor that tp gathers is cast before, so each rank casts its share
        of_inputs, of_outputs = (
            degrees.tp if stack.gathers_fp8 and product.split == side else 1 for side in ("outputs", "inputs")
        )
        casts = casts * np.array([m * k / of_inputs + n * k, m * n / of_outputs])
        forward = forward + count * (_product(profile, speed, m, n, k, width, groups) + casts[0])
        inputs = inputs + count * (_product(profile, speed, m, k, n, width, groups) + casts[1])
        weights = weights + count * trained * _product(profile, speed, k, n, m, width, groups)
    attention, attention_backward = _attention(shape, kind, work, peak, rate, profile, degrees)
    # the traffic is estimated from what a stack with one kernel for each operation would save for the backward pass;
    # without sequence parallelism each tp rank repeats the norms
    eager = Stack(is_sequence_parallel=stack.is_sequence_parallel)
    saved = saved_bytes(kind.saved, degrees.tp, work.compute_bytes, eager, degrees.token_parts)
    rest = 1.5 * stack.elementwise * tokens * saved
    return _BlockTimes(forward, inputs, weights, attention, attention_backward, rest / profile.memory_bandwidth)


def _sides(
    shape: ModelShape, product: Product, degrees: _Degrees, tokens: Floats
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return the size of a product on one rank: tokens, outputs, inputs, number of equal products, narrowest side."""
    tp = degrees.tp // degrees.token_parts if product.is_routed else degrees.tp
    n = product.outputs / (tp if product.split == "outputs" else 1)
    k = product.inputs / (tp if product.split == "inputs" else 1)
    if not product.is_routed:
        ones = np.ones_like(tokens)
        return tokens, n * ones, k * ones, ones, shape.narrowest / degrees.tp
    experts = shape.num_experts / degrees.ep
    m = tokens / degrees.token_parts * shape.top_k / experts
    return m, n * np.ones_like(tokens), k * np.ones_like(tokens), experts, np.minimum(n, k)


def _product(
    profile: HardwareProfile,
    rate: float,
    m: Floats,
    n: Floats,
    k: Floats,
    width: Floats,
    groups: Floats | float = 1.0,
) -> Floats:
    """Return the seconds of `groups` products of m x k by k x n. `width`: the narrowest side of the model."""
    if not profile.multiprocessors:
        narrowest = np.minimum(width, m)
        return groups * 2 * m * n * k / rate * (narrowest + profile.half_width) / narrowest
    depth = k + rate / profile.memory_bandwidth
    seconds = np.full_like(m, np.inf)
    for rows, outputs, share in _TILES:
        tiles = groups * np.ceil(m / rows) * np.ceil(n / outputs)
        waves = np.ceil(tiles / profile.multiprocessors) * profile.multiprocessors
        seconds = np.minimum(seconds, waves * 2 * rows * outputs * depth / (share * rate))
    moved = groups * _HALF * (m * k + k * n + m * n) / profile.memory_bandwidth
    return np.maximum(seconds, moved)


def _attention(
    shape: ModelShape,
    kind: BlockShape,
    work: Work,
    peak: float,
    rate: float,
    profile: HardwareProfile,
    degrees: _Degrees,
) -> tuple[Floats, Floats]:
    """Return the seconds of attention, forward and backward."""
    tokens = work.micro_size * shape.seq_len / degrees.cp
    head_split = 1 if shape.attention_is_whole else degrees.tp
    kernel = work.stack.attention
    if kernel is AttentionKernel.UNFUSED and profile.multiprocessors:
        return _unfused(shape, work, rate, profile, degrees)
    flops = tokens / head_split * kind.attention_flops
    scores, length = 2.0, shape.seq_len  # of a block with a window, relative to one without
    if work.stack.skips_masked:
        length = min(shape.seq_len, 2 * (shape.window + _WINDOW_TILE))
        scores = length / shape.seq_len
    parts = ((1 - shape.windowed, shape.seq_len), (shape.windowed * scores, length))
    speed = profile.vendor_attention if kernel is AttentionKernel.CUDNN else _KERNEL_SPEED.get(kernel, 1.0)
    if not profile.attention_rates:
        seconds = sum(part for part, _ in parts) * flops / (peak * profile.attention_efficiency * speed)
        return seconds, _BACKWARD_ATTENTION * seconds
    speed *= NARROW_HEAD_SHARE if shape.head_dim < WIDE_HEAD else 1.0
    forward, backward = (
        flops / speed * sum(part / _attention_rate(profile, keys, direction) for part, keys in parts)
        for direction in (0, 1)
    )
    return forward, _BACKWARD_ATTENTION * backward


def _attention_rate(profile: HardwareProfile, length: float, direction: int) -> float:
    """Return the rate at a length of causal attention. `direction`: 0 forward, 1 backward."""
    lengths = sorted(profile.attention_rates)
    rates = [profile.attention_rates[measured][direction] for measured in lengths]
    return float(np.interp(math.log(length), np.log(lengths), rates))


def _unfused(
    shape: ModelShape, work: Work, rate: float, profile: HardwareProfile, degrees: _Degrees
) -> tuple[Floats, Floats]:
    """Return the seconds of both products of all heads, causal or not, and of the traffic of the scores."""
    groups = work.micro_size * shape.num_heads / degrees.tp
    rows, keys, dim = (np.full_like(groups, size) for size in (shape.seq_len, shape.seq_len, shape.head_dim))
    rows = rows / degrees.cp
    products = _product(profile, rate, rows, keys, dim, dim, groups) + _product(
        profile, rate, rows, dim, keys, dim, groups
    )
    forward, backward = (traffic * groups * rows * keys / profile.memory_bandwidth for traffic in _SCORE_TRAFFIC)
    return products + forward, 2 * products + backward
