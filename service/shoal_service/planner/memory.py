"""Bytes of one rank at the peak of a step (`memory`), and the host memory of a worker (`host_need`).

What the engine holds (FSDP2 with fp32 parameters and optimizer state; computation in the type of the precision):

    parameters    4 bytes, sharded by dp_shard x cp (experts: by ep and the rest of it), after tp and pp
    optimizer     its state by its name (`parameter_state`), two moments of AdamW, 8 bytes; sharded in the same way
    gradients     4 bytes for what is trained, sharded in the same way, plus those of one unit and of the root while
                  they are reduced; or whole ones, 4 bytes, if a step reduces once (ZeRO-1, pipelines) and has several
                  micro-batches; the larger of the two; or, if nothing is sharded, 8 bytes: what autograd has made,
                  and the buckets in which it is summed. With a single micro-batch gradients appear while activations
                  are freed, so only the part that exceeds the activations counts
    gathered      parameters in the type of the computation: all of the rank if they stay whole (ZeRO-1, ZeRO-2,
                  pipelines), else two units and the root
    activations   saved for the backward pass, times the micro-batches in flight, plus what one block recomputes. With
                  cp attention saves the keys and values of all ranks (all_gather), or the copies that the exchange
                  of heads needs (ulysses)
    logits        of one micro-batch, with the copies that the loss makes
    exchange      tokens on their way to experts and back
    snapshots     on a CPU: of the own state, beyond the one that is trained (`count_local_copies`)
    reserved      from the profile

The temporaries of the optimizer (4 bytes per parameter of the rank, foreach) exist when activations do not, so the
larger of the two counts.

Host memory: what a worker trains with, and what it and its buddy keep of its state in shared memory:

    own snapshots   on a CPU with the built-in AdamW the state itself is in shared memory, twice: one more copy of it.
                    Otherwise two copies
    sent            copies of the state for the buddy: one is sent, one stays until the next has arrived, one is written
    kept            at the buddy: the two newest copies
    build           a task of the user's own that has not declared `deferred_init` builds its whole model first

Snapshots of an earlier layout stay until the new group has its own, and are not counted. `ranking`, `planning` and
`report` call this; `core/attempt/placement.py` adds up the workers of a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from shoal_service.core.hardware_profile import HardwareProfile
from shoal_service.core.layout_plan import UNKNOWN_NEED, HostNeed
from shoal_service.planner.candidates import CONTEXTS, LEVELS, RECOMPUTES, Candidates, Floats, Ints
from shoal_service.planner.gpus import CPU
from shoal_service.planner.parameter_state import ALL_ADAMW, ParameterState, estimate_state
from shoal_service.planner.shape import BlockShape, ModelShape, SavedTensors
from shoal_service.planner.stack import SHOAL, AttentionKernel, Stack
from shoal_workers.contract.hugging_face import HF_TASKS
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.layout import ContextMethod, Layout, Recompute, Schedule, ShardLevel
from shoal_workers.contract.spec import JobSpec, Precision, Reduction

SENT_COPIES = {True: 3, False: 2}
"""Copies of the state besides the own snapshots, by whether the state is double-buffered."""
KEPT_COPIES = 2
_FP32 = 4
_WIDTHS = 4
"""Tensors of the width of a feed-forward layer that this engine saves."""
_SCORE_BYTES = 5
"""A softmax and the result of its dropout, 2 bytes each, and the mask, for each score."""
_CODED_BYTES = 1 + 4 / 128
"""Bytes of a rounded gradient."""
_ROUNDING_BYTES = 2 * _FP32 + _CODED_BYTES
"""Bytes that shards take to round a gradient: a copy that fills the last blocks, random numbers, and what is sent."""
_EXCHANGES = 3
"""What plain replicas keep of each rounded gradient until the last bucket: sent, received, and the gathered sum."""
_PLAIN_GRADIENTS = 2
"""What autograd has made, and the buckets in which it is summed."""


class BytesPart(StrEnum):
    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    GATHERED = "gathered"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    EXCHANGE = "exchange"
    SNAPSHOTS = "snapshots"
    RESERVED = "reserved"


@dataclass(frozen=True, slots=True)
class Work:
    """What a step consists of, besides the model."""

    micro_size: int
    num_micro_batches: int
    compute_bytes: int
    """Bytes of one number in the forward and backward pass."""
    snapshot_copies: int = 0
    """Copies of a rank's state that its snapshots need in the memory in which it trains."""
    param_state: ParameterState = ALL_ADAMW
    stack: Stack = SHOAL
    reduction: Reduction = Precision.FP32
    """Type in which gradients are sent; fp32 means that of the stack."""


@dataclass(frozen=True, slots=True)
class ContentColumns:
    """`cuts.Content` as columns, one entry for each layout."""

    rank: Ints
    num_dense: Ints
    num_moe: Ints
    has_embedding: Ints
    has_head: Ints


def content_columns(columns: Candidates, which: str, index: int = 0) -> ContentColumns:
    """The content of the "slowest" rank of each cut, of its slowest "inner" one, or of one of its "extremes"."""
    contents = [cut.extremes[index] if which == "extremes" else getattr(cut, which) for cut in columns.cuts]
    table = np.array(
        [(c.rank, c.num_dense, c.num_moe, c.has_embedding, c.has_head) for c in contents], np.int64
    ).reshape(-1, 5)
    return ContentColumns(*table[columns.cut].T)


def memory(
    shape: ModelShape, work: Work, profile: HardwareProfile, columns: Candidates
) -> tuple[Floats, dict[BytesPart, Floats]]:
    """Bytes of the rank that needs the most, and their parts, which add up to them."""
    ranks = [_parts(shape, work, profile, columns, contents) for contents in _extremes(columns)]
    totals = np.array([np.sum(list(parts.values()), axis=0) for parts in ranks])
    worst = np.argmax(totals, axis=0)
    return totals.max(axis=0), {part: np.choose(worst, [parts[part] for parts in ranks]) for part in BytesPart}


def _extremes(columns: Candidates) -> list[ContentColumns]:
    return [content_columns(columns, "extremes", index) for index in range(3)]


def shard_params(shape: ModelShape, columns: Candidates) -> Floats:
    """Parameters of the rank that holds the most, as the data axes shard them."""
    params = (rank_params(shape, columns, contents) for contents in _extremes(columns))
    shards = [dense / columns.shards + experts / columns.expert_shards for dense, experts in params]
    largest: Floats = np.max(shards, axis=0)
    return largest


def rank_params(shape: ModelShape, columns: Candidates, content: ContentColumns) -> tuple[Floats, Floats]:
    """Parameters of one rank before the data axes shard them: (dense, experts)."""
    tables = content.has_embedding + content.has_head
    if shape.tied:
        tables = np.minimum(tables, 1)
    split = content.num_dense * shape.dense.split_params + content.num_moe * shape.moe.split_params
    whole = content.num_dense * shape.dense.whole_params + content.num_moe * shape.moe.whole_params
    dense = (split + tables * shape.table_params) / columns.tp + whole
    experts = content.num_moe * shape.moe.expert_params / _expert_parts(shape, columns)
    return dense, experts


def _expert_parts(shape: ModelShape, columns: Candidates) -> Ints:
    """Parts into which tp and ep split the experts of a block."""
    parts: Ints = columns.ep if shape.experts_are_whole else columns.tp // columns.token_parts * columns.ep
    return parts


def saved_bytes(
    saved: SavedTensors, tp: Ints, compute_bytes: int, stack: Stack = SHOAL, token_parts: Ints | int = 1
) -> Floats:
    """Bytes per token of a tp group, on one rank."""
    norms = saved.split_fp32 * max(stack.norm_input_bytes, compute_bytes)
    between_layers = tp if stack.is_sequence_parallel else 1
    gathered = between_layers if stack.gathers_again else 1
    cast = saved.whole_cast * _FP32 * (compute_bytes < _FP32)
    whole = saved.whole * compute_bytes / gathered + saved.whole_fp32 * _FP32 + cast
    whole = whole + saved.routed * compute_bytes / token_parts
    return saved.split * compute_bytes / tp + (norms + saved.residual * compute_bytes) / between_layers + whole


def in_flight(columns: Candidates, rank: Ints) -> Floats:
    """Micro-batches whose activations a pipeline rank holds at one time. A stage counts by its share of the rank.

    1F1B: Narayanan et al. 2019; interleaved: the same, 2021, warm-up as in torch; zbv and dualpipev: Qi et al. 2024 and
    DeepSeek-AI 2024, 2 pp and 2 pp + 1 halves on every rank.
    """
    pp, v, fed = columns.pp, columns.per_rank, columns.fed
    ahead = pp - 1 - rank
    interleaved = np.minimum(fed * v, 2 * ahead + (v - 1) * pp + 1) / v
    return np.select(
        [
            pp == 1,
            columns.is_schedule(Schedule.GPIPE),
            columns.is_schedule(Schedule.ONE_F_ONE_B),
            columns.is_schedule(Schedule.INTERLEAVED),
            columns.is_schedule(Schedule.ZERO_BUBBLE_V),
        ],
        [np.ones(len(columns)), fed, np.minimum(fed, ahead + 1), interleaved, np.minimum(fed, pp)],
        np.minimum(fed, pp + 0.5),
    )


def _parts(
    shape: ModelShape, work: Work, profile: HardwareProfile, columns: Candidates, content: ContentColumns
) -> dict[BytesPart, Floats]:
    dense, experts = rank_params(shape, columns, content)
    params = dense + experts
    cut_dense, cut_experts = dense / columns.shards, experts / columns.expert_shards
    cut_params, param_state = cut_dense + cut_experts, work.param_state

    def sum_shard(of_dense: float, of_experts: float) -> Floats:
        return cut_dense * of_dense + cut_experts * of_experts

    cut_trained = sum_shard(param_state.dense.trained_share, param_state.experts.trained_share)
    trained = dense * param_state.dense.trained_share + experts * param_state.experts.trained_share
    share = np.divide(trained, params, out=np.zeros(len(columns)), where=params > 0)
    on_device, stack = 0.0 if columns.offload else 1.0, work.stack
    keeps_whole = (columns.level != LEVELS.index(ShardLevel.FULL)) | (columns.pp > 1)
    is_whole_pipeline = (columns.pp > 1) & (not stack.shards_in_pipeline)
    reduces_once = (columns.level == LEVELS.index(ShardLevel.OPTIMIZER)) | is_whole_pipeline
    is_plain = columns.level == LEVELS.index(ShardLevel.NONE)
    has_whole_gradients = reduces_once & (columns.fed > 1)
    unit = np.maximum(
        (content.num_dense > 0) * _unit(shape, shape.dense, columns),
        (content.num_moe > 0) * _unit(shape, shape.moe, columns),
    )
    tables = (
        np.minimum(1, content.has_embedding + content.has_head)
        if shape.tied
        else (content.has_embedding + content.has_head)
    )
    root = tables * shape.table_params / columns.tp
    size = work.compute_bytes
    gathered = np.where(keeps_whole, params, np.minimum(params, 2 * unit + root)) * size * ~is_plain
    # whole gradients are sharded unit by unit in the last backward pass, while activations are freed; otherwise the
    # gradient of a unit leaves the backward pass in the compute type and is reduced in the type of reductions
    is_rounded = work.reduction == "int8"
    moving = np.minimum(params, unit + root) * (size + stack.gradient_bytes + _ROUNDING_BYTES * is_rounded) * share
    tokens = work.micro_size * shape.seq_len / columns.cp
    saved = _saved_by_mode(shape, work, columns, content) * in_flight(columns, content.rank)
    again = np.where(columns.recompute == RECOMPUTES.index(Recompute.NONE), 0.0, _one_block(shape, work, columns))
    again = again + _scores(shape, work, columns)
    logit_bytes = stack.logit_bytes + size * (size < _FP32)
    logits = content.has_head * tokens * shape.vocab_size / columns.tp * logit_bytes
    exchange = (columns.ep > 1) * (content.num_moe > 0) * 2 * tokens / columns.token_parts * shape.top_k
    exchange = exchange * shape.dim * size
    activations = tokens * (saved + again)
    logits = np.maximum(0.0, logits - tokens * again)  # both are freed before the other is made
    cut_gradients = cut_trained * stack.held_gradient_bytes * on_device
    not_yet = np.where(columns.fed > 1, 0.0, np.minimum(cut_gradients, activations))
    summed = trained * stack.summed_gradient_bytes * has_whole_gradients
    gradients = np.maximum(summed, cut_gradients - not_yet + moving)
    plain = _FP32 * _PLAIN_GRADIENTS + _CODED_BYTES * _EXCHANGES * is_rounded
    gradients = np.where(is_plain, trained * plain, gradients)
    temporaries = (cut_gradients + not_yet) * (not stack.updates_in_place)
    shortfall = np.maximum(0.0, temporaries - (activations + logits + exchange + gathered * ~keeps_whole))
    moments = stack.moment_bytes / _FP32
    return {
        BytesPart.PARAMETERS: cut_params * stack.parameter_bytes * on_device,
        BytesPart.OPTIMIZER: moments
        * sum_shard(param_state.dense.state_bytes, param_state.experts.state_bytes)
        * on_device
        + shortfall
        + cut_trained * stack.update_bytes,
        BytesPart.GRADIENTS: gradients,
        BytesPart.GATHERED: gathered,
        BytesPart.ACTIVATIONS: activations,
        BytesPart.LOGITS: logits,
        BytesPart.EXCHANGE: exchange,
        BytesPart.SNAPSHOTS: sum_shard(param_state.dense.snapshot_bytes, param_state.experts.snapshot_bytes)
        * work.snapshot_copies,
        BytesPart.RESERVED: np.full(len(columns), float(profile.reserved_bytes)),
    }


def _unit(shape: ModelShape, block: BlockShape, columns: Candidates) -> Floats:
    """Parameters of one gathered block on one rank."""
    return block.split_params / columns.tp + block.whole_params + block.expert_params / _expert_parts(shape, columns)


def _saved_by_mode(shape: ModelShape, work: Work, columns: Candidates, content: ContentColumns) -> Floats:
    """Bytes per token that one micro-batch saves on a rank."""
    size, stack = work.compute_bytes, work.stack

    def bytes_of(block: BlockShape, mode: Recompute) -> Floats:
        return saved_bytes(saved_by(block, mode, stack), columns.tp, size, stack, columns.token_parts)

    blocks = content.num_dense + content.num_moe
    exchanged = blocks * exchanged_keys(shape, columns) * size
    scores = blocks * _scores(shape, work, columns) * stack.keeps_scores
    by_mode = [
        content.num_dense * bytes_of(shape.dense, mode)
        + content.num_moe * bytes_of(shape.moe, mode)
        + exchanged * (mode is Recompute.NONE)
        + scores * (mode is not Recompute.FULL)
        for mode in RECOMPUTES
    ]
    between_layers = columns.tp if stack.is_sequence_parallel else 1
    ends = (content.has_embedding + content.has_head * 3) * shape.dim * size / between_layers
    return np.choose(columns.recompute, by_mode) + ends


def _one_block(shape: ModelShape, work: Work, columns: Candidates) -> Floats:
    """Bytes per token that are recomputed for the backward pass of one block."""
    size, stack = work.compute_bytes, work.stack
    kinds = [shape.dense] * (shape.num_dense > 0) + [shape.moe] * (shape.num_moe > 0)
    modes = [saved_by(block, Recompute.NONE, stack) for block in kinds]
    saved = [saved_bytes(mode, columns.tp, size, stack, columns.token_parts) for mode in modes]
    largest: Floats = np.max(saved, axis=0) + exchanged_keys(shape, columns) * size
    return largest


def exchanged_keys(shape: ModelShape, columns: Candidates) -> Floats:
    """Numbers per token of a rank that attention of a block saves for its keys and values beyond the rank's own."""
    split, keys = 1 if shape.attention_is_whole else columns.tp, 2 * shape.num_kv_heads * shape.head_dim
    copies = np.where(columns.context == CONTEXTS.index(ContextMethod.ULYSSES), key_copies(shape, columns), columns.cp)
    numbers: Floats = copies * keys / np.minimum(split, shape.num_kv_heads) - keys / split
    return numbers


def key_copies(shape: ModelShape, columns: Candidates) -> Ints:
    """Copies of keys and values that `ulysses` makes until cp divides the heads of a tp rank that have them."""
    heads = np.maximum(1, shape.num_kv_heads // columns.tp)
    copies: Ints = np.lcm(heads, columns.cp) // heads
    return copies


def _scores(shape: ModelShape, work: Work, columns: Candidates) -> Floats:
    """Bytes per token of the scores of one block, if attention writes them (Korthikanti et al. 2022, equation 1)."""
    num_bytes = _SCORE_BYTES * (work.stack.attention is AttentionKernel.UNFUSED)
    scores: Floats = num_bytes * shape.num_heads * shape.seq_len / columns.tp
    return scores


def saved_by(block: BlockShape, mode: Recompute, stack: Stack) -> SavedTensors:
    """What a stack saves of a block."""
    match mode:
        case Recompute.NONE:
            return replace(block.saved, split=block.saved.split - (_WIDTHS - stack.widths_saved) * block.width)
        case Recompute.SELECTIVE:
            kept, share = block.saved_selective, stack.selective_share
            products = kept.split - block.attended
            whole, routed = round(share * kept.whole), round(share * kept.routed)
            return replace(kept, split=round(block.attended + share * products), whole=whole, routed=routed)
        case Recompute.FULL:
            return block.saved_full


def count_local_copies(spec: JobSpec) -> int:
    """Copies of the state beyond the one that is trained."""
    if not spec.snapshot.enabled:
        return 0
    return 1 if _is_double_buffered(spec) else 2


def host_need(spec: JobSpec, rank_params: float, training: float, shape: ModelShape | None = None) -> HostNeed:
    """`rank_params`: parameters of the worker's shard. `training`: bytes of host memory at the peak of a step."""
    param_state = estimate_state(spec, shape)
    state = round(rank_params * param_state.snapshot_bytes(shape))
    keeps = spec.snapshot.enabled
    return HostNeed(
        process=CPU.reserved_bytes,
        training=round(training),
        build=whole_build(spec),
        snapshots=count_local_copies(spec) * state,
        sent=SENT_COPIES[_is_double_buffered(spec)] * state * keeps,
        kept=KEPT_COPIES * state * keeps,
    )


def gpu_host_bytes(spec: JobSpec, shape: ModelShape, rank_params: Floats, *, offload: bool) -> Floats:
    """Bytes of the host's memory that workers with a GPU need, without copies for a buddy: what is offloaded, the
    snapshots, and the process.

    The start needs no more: a worker draws or reads its own part of the weights, piece by piece, onto the GPU.
    """
    param_state = estimate_state(spec, shape)
    snapshots = param_state.snapshot_bytes(shape) * count_local_copies(spec)
    num_bytes: Floats = rank_params * (param_state.offloaded_bytes(shape) * offload + snapshots) + CPU.reserved_bytes
    return num_bytes


def least_need(spec: JobSpec, layout: Layout, num_params: int) -> HostNeed:
    """If only the number of parameters is known; 0: not even that. At least, because nothing is known of activations,
    nor how evenly the parameters are split."""
    if not num_params:
        return UNKNOWN_NEED
    params = num_params / (layout.pp * layout.tp * layout.num_shards)
    param_bytes = estimate_state(spec, None).offloaded_bytes(None)
    return host_need(spec, params, 0.0 if spec.worker.gpus else params * param_bytes)


def num_params_of(spec: JobSpec) -> int:
    """The number that the spec declares; 0: it declares none."""
    return spec.plan.num_params if spec.plan is not None else 0


def whole_build(spec: JobSpec) -> int:
    """Bytes of the whole model, if each worker builds it and its number of parameters is declared."""
    if spec.task in (LM_TASK, *HF_TASKS) or spec.plan is None or spec.plan.deferred_init:
        return 0
    return 4 * num_params_of(spec)


def _is_double_buffered(spec: JobSpec) -> bool:
    return not spec.worker.gpus and spec.optimizer.fused is not True and spec.optimizer.is_elementwise
