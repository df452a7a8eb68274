"""Seconds of one optimizer step, by what they are spent on; columns in, columns out. `ranking` calls `step_time`.

A micro-batch on the slowest pipeline rank takes

    t = compute + recompute + tp + cp + ep + pp + dp (gathered and reduced for each micro-batch)

and a step takes

    fed x t + bubble + dp (gathered and reduced once) + update + overhead

of which (fed - num_micro_batches / data ranks) x t is padding, from the uneven partition and from the pipeline.

Communication along tp, cp and ep delays the computation. Communication along pp and the data axes overlaps with it by
the share `overlap` of the profile, and by no more than the time of the computation.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from shoal_service.core.hardware_profile import HardwareProfile
from shoal_service.planner.candidates import CONTEXTS, LEVELS, RECOMPUTES, Candidates, Floats, Ints
from shoal_service.planner.compute import compute_s
from shoal_service.planner.holding import PerParameter
from shoal_service.planner.memory import ContentColumns, Work, content_columns, key_copies, rank_params
from shoal_service.planner.network import Group, Network, send_s
from shoal_service.planner.shape import ModelShape
from shoal_workers.contract.layout import ContextMethod, Recompute, Schedule, ShardLevel
from shoal_workers.contract.spec import Precision

_FP32, _FP8 = 4, 1
_UPDATE_BYTES = 20
"""Bytes moved for a trained parameter by clipping and the update, besides its state: parameter, gradient and a
temporary are read or written."""
_SUM_BYTES = 10
"""Bytes moved to add a gradient of a micro-batch, 2 bytes, to their sum, 4 bytes."""
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
) -> tuple[Floats, dict[SecondsPart, Floats]]:
    """Seconds of a step, and their parts, which add up to them."""
    profile, sharing = network.profile, network.sharing
    content = content_columns(columns, "slowest")
    passes = compute_s(shape, work, precision, profile, columns, content)
    compute, recompute = sharing * (passes.forward + passes.backward), sharing * passes.recompute
    tp = _tensor(shape, work, network, columns, content)
    cp = _context(shape, work, network, columns, content)
    ep = _experts(shape, work, network, columns, content)
    pp = _pipeline(shape, work, network, columns)
    each, once = _data(shape, work, network, columns, content, compute)
    micro_batch_s = compute + recompute + tp + cp + ep + pp + each
    share = work.num_micro_batches / (columns.dp_replicate * columns.dp_shard)
    bubble = _bubble(columns, micro_batch_s)
    dense, experts = rank_params(shape, columns, content)
    of_dense, of_experts = work.holding.dense, work.holding.experts
    update_bytes = dense / columns.shards * _update_bytes(of_dense)
    update_bytes = update_bytes + experts * columns.ep / columns.shards * _update_bytes(of_experts)
    update = update_bytes / (profile.host_bandwidth if columns.offload else profile.memory_bandwidth) * sharing
    overhead = np.full(len(columns), profile.step_overhead_s) * sharing
    parts = {
        SecondsPart.COMPUTE: share * compute,
        SecondsPart.RECOMPUTE: share * recompute,
        SecondsPart.TP: share * tp,
        SecondsPart.CP: share * cp,
        SecondsPart.EP: share * ep,
        SecondsPart.PP: share * pp,
        SecondsPart.DP: share * each + once,
        SecondsPart.BUBBLE: bubble,
        SecondsPart.PADDING: (columns.fed - share) * micro_batch_s,
        SecondsPart.UPDATE: update,
        SecondsPart.OVERHEAD: overhead,
    }
    return np.sum(list(parts.values()), axis=0), parts


def _update_bytes(term: PerParameter) -> float:
    return _UPDATE_BYTES * term.trained + _STATE_PASSES * term.state_bytes


def _tokens(shape: ModelShape, work: Work, columns: Candidates) -> Floats:
    """Tokens of one micro-batch in one tp group."""
    return work.micro_size * shape.seq_len / columns.cp


def _tensor(shape: ModelShape, work: Work, network: Network, columns: Candidates, content: ContentColumns) -> Floats:
    """Sequence parallel (Korthikanti et al. 2022): a gather before and a reduce-scatter after attention and the
    feed-forward layer, in both passes. Recomputation repeats those of the forward pass; selective, only the gathers.

    Without sequence parallelism each pair is one all-reduce, which takes as long. In the backward pass, what precedes a
    column layer can run beside the matrix product for the gradient of its weights, half of it."""
    tensor_group, stack = network.group(network.spans.of_axis["tp"]), work.stack
    size = (work.compute_bytes + _FP8) / 2 if stack.gathers_fp8 else work.compute_bytes  # only gathers are in fp8
    gather_s = tensor_group.gather_s(_tokens(shape, work, columns) * shape.dim * size)
    again = 2.0 * (stack.gathers_again and stack.is_sequence_parallel)
    hidden = network.profile.overlap * stack.hides_tensor
    backward = 4 + again - hidden * (2 + again)
    times = {Recompute.NONE: 4 + backward, Recompute.SELECTIVE: 6 - again + backward, Recompute.FULL: 8 + backward}
    per_block = np.choose(columns.recompute, [np.full(len(columns), times[mode]) for mode in RECOMPUTES])
    ends = 2 * (content.has_embedding + content.has_head)
    seconds: Floats = gather_s * ((content.num_dense + content.num_moe) * per_block + ends)
    return seconds


def _context(shape: ModelShape, work: Work, network: Network, columns: Candidates, content: ContentColumns) -> Floats:
    """Keys and values are gathered in the forward pass and their gradients reduced in the backward pass; or queries,
    keys, values and results are exchanged in both (Jacobs et al. 2023)."""
    context_group = network.group(network.spans.of_axis["cp"])
    size, tokens = work.compute_bytes, _tokens(shape, work, columns)
    split = 1 if shape.attention_is_whole else columns.tp
    keys = 2 * shape.num_kv_heads * shape.head_dim / split
    gather = context_group.gather_s(tokens * columns.cp * keys * size)
    queries = 2 * shape.num_heads * shape.head_dim / split
    exchange = 2 * context_group.exchange_s(tokens * (queries + keys * key_copies(shape, columns)) * size / 2)
    collective_s: Floats = np.where(columns.context == CONTEXTS.index(ContextMethod.ULYSSES), exchange, gather)
    times: Floats = np.where(columns.recompute == RECOMPUTES.index(Recompute.NONE), 2.0, 3.0)
    blocks: Ints = content.num_dense + content.num_moe
    return blocks * times * collective_s


def _experts(shape: ModelShape, work: Work, network: Network, columns: Candidates, content: ContentColumns) -> Floats:
    """Each token goes to top_k experts and comes back, in both passes."""
    expert_group, stack = network.group(network.spans.of_axis["ep"]), work.stack
    tokens = _tokens(shape, work, columns) / (columns.tp if stack.splits_routed_tokens else 1)
    sent = tokens * shape.top_k * shape.dim * work.compute_bytes
    times = np.where(columns.recompute == RECOMPUTES.index(Recompute.NONE), 4.0, 6.0)
    exchange_s = expert_group.exchange_s(sent, shape.top_k if stack.dispatches_once else 1)
    return content.num_moe * times * exchange_s * (1 - stack.expert_overlap)


def _pipeline(shape: ModelShape, work: Work, network: Network, columns: Candidates) -> Floats:
    """Activations to the next stage and gradients back, for each micro-batch."""
    stack = work.stack
    num_bytes = _tokens(shape, work, columns) * shape.dim * work.compute_bytes
    num_bytes = num_bytes / (columns.tp if stack.scatters_messages else 1)
    message_s = send_s(network.profile, num_bytes, network.spans.of_axis["pp"].link)
    waits = 2 * (1 - network.profile.overlap) if stack.message_waits is None else stack.message_waits
    sends = waits * columns.per_rank * message_s * network.sharing
    return np.where(columns.pp > 1, sends, 0.0)


def _data(
    shape: ModelShape,
    work: Work,
    network: Network,
    columns: Candidates,
    content: ContentColumns,
    compute: Floats,
) -> tuple[Floats, Floats]:
    """Seconds that do not overlap with computation: (for each micro-batch, once a step)."""
    dense, experts = rank_params(shape, columns, content)
    profile, spans, shards = network.profile, network.spans, columns.shards
    dense_group, expert_group = network.group(spans.shards), network.group(spans.experts)
    replicas = network.group(spans.of_axis["dp_replicate"])
    units = content.num_dense + content.num_moe

    def moved(size: int) -> Floats:
        """Gather all parameters that the rank computes with."""
        cost = _in_units(dense_group, dense * size, units)
        return cost + np.where(experts > 0, _in_units(expert_group, experts * size, content.num_moe), 0.0)

    gather = moved(work.compute_bytes)
    trained_dense, trained_experts = dense * work.holding.dense.trained, experts * work.holding.experts.trained
    size = work.stack.gradient_bytes
    reduce = _in_units(dense_group, trained_dense * size, units)
    reduce = reduce + np.where(
        trained_experts > 0, _in_units(expert_group, trained_experts * size, content.num_moe), 0.0
    )
    state = trained_dense / shards + trained_experts * columns.ep / shards
    across = replicas.reduce_s(state * size)
    is_full = (columns.level == LEVELS.index(ShardLevel.FULL)) & (columns.pp == 1)
    reduces_once = [LEVELS.index(level) for level in (ShardLevel.OPTIMIZER, ShardLevel.NONE)]
    reduces_each = ~np.isin(columns.level, reduces_once) & ((columns.pp == 1) | work.stack.shards_in_pipeline)
    each = np.where(is_full, 2 * gather, 0.0) + np.where(reduces_each, reduce, 0.0)
    summed = (trained_dense + trained_experts) * _SUM_BYTES / profile.memory_bandwidth * network.sharing
    summed = np.where(reduces_each | (columns.fed == 1) | work.stack.sums_in_product, 0.0, summed)
    reduce_once = (1 + work.stack.reduces_whole) * reduce
    once = np.where(is_full, 0.0, gather) + np.where(reduces_each, 0.0, reduce_once) + across
    if columns.offload:
        once = once + 2 * state * _FP32 / profile.host_bandwidth
    if not work.stack.hides_data:
        return each + summed, once
    return _exposed(each, compute, profile) + summed, _exposed(once, compute, profile)


def _in_units(cut_group: Group, num_bytes: Floats, units: Ints) -> Floats:
    """One collective for each unit and one for the root; each has the latency once."""
    return cut_group.gather_s(num_bytes) + np.where(cut_group.size > 1, units * cut_group.latency_s, 0.0)


def _exposed(communication: Floats, compute: Floats, profile: HardwareProfile) -> Floats:
    return communication - np.minimum(profile.overlap * communication, compute)


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
    others = pp * np.array([cut.evenness for cut in columns.cuts])[columns.cut] - 1
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
