"""Predicts the seconds of computing of one micro-batch on one rank: matrix products, attention, elementwise operations.

On a GPU a product of M x N x K is cut into tiles. Each multiprocessor computes one tile at a time, so the time is that
of whole waves of tiles. A finished tile is written at memory bandwidth, which takes as long as rate / bandwidth more
terms of its inner dimension (CUTLASS, "Efficient GEMM in CUDA"; NVIDIA's guide "Matrix Multiplication Background", wave
quantization). The rate of large products is measured (`gpus`). For hardware without a known number of multiprocessors
one formula holds for all shapes, by the narrowest side.

Layouts with equal tp, cp and ep have the same times of blocks, so each combination is computed once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from shoal_service.core.hardware_profile import NARROW_HEAD_SHARE, WIDE_HEAD, HardwareProfile
from shoal_service.planner.candidates import RECOMPUTES, Candidates, Floats, Ints
from shoal_service.planner.memory import ContentColumns, Work, saved_bytes
from shoal_service.planner.shape import BlockShape, ModelShape, Product
from shoal_service.planner.stack import AttentionKernel, Stack
from shoal_workers.contract.layout import Recompute, Schedule
from shoal_workers.contract.spec import Precision

_FP32, _HALF = 4, 2
_TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7))
"""Rows and columns of a tile, and its rate relative to the largest tile: smaller tiles read more for each operation.
The rates are estimates."""
IMBALANCE = 1.1
"""Load of the busiest rank of experts relative to the mean, with a balanced router."""
_SPLIT_BACKWARD = 1.08
"""zbv and dualpipev run the backward pass in two halves, which cannot be compiled (torch 2.13)."""
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
    keys = (columns.tp * base + columns.cp) * base + columns.ep
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    degrees = _Degrees(columns.tp[first], columns.cp[first], columns.ep[first])
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
    head_s = head_s + tokens / degrees.tp * shape.vocab_size * 2 * _FP32 / profile.memory_bandwidth
    head = content.has_head * head_s[index]
    launch = (content.num_dense + content.num_moe) * profile.block_overhead_s
    forward = times.products + times.attention + times.rest + head + launch / 3
    backward = times.inputs + times.weights + times.attention_backward + 2 * times.rest
    backward = backward + (1 + work.holding.dense.trained) * head + launch * 2 / 3
    is_split = columns.is_schedule(Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V) & (columns.pp > 1)
    backward = backward * np.where(is_split, _SPLIT_BACKWARD, 1.0)
    unfused_attention = np.zeros(len(columns)) + times.attention * (work.stack.attention is AttentionKernel.UNFUSED)
    selective = times.rest + (1 - work.stack.selective_share) * times.products
    by_mode = {
        Recompute.NONE: unfused_attention,
        Recompute.SELECTIVE: unfused_attention + selective,
        Recompute.FULL: times.products + times.attention + times.rest,
    }
    slowest = _slowest(columns.world_size, profile)
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
    peak, stack, holding = profile.peak_flops[precision], work.stack, work.holding
    rate = peak * profile.matmul_efficiency
    forward, inputs, weights = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(tokens)
    for product in kind.products:
        m, n, k, groups, width = _sides(shape, product, degrees, tokens)
        count = product.count * (IMBALANCE if product.is_routed else 1.0)
        trained = (holding.experts if product.is_routed else holding.dense).trained
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
    rest = 1.5 * stack.elementwise * tokens * saved_bytes(kind.saved, degrees.tp, work.compute_bytes, eager)
    return _BlockTimes(forward, inputs, weights, attention, attention_backward, rest / profile.memory_bandwidth)


def _sides(
    shape: ModelShape, product: Product, degrees: _Degrees, tokens: Floats
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return the size of a product on one rank: tokens, outputs, inputs, number of equal products, narrowest side."""
    tp = degrees.tp if product.split else np.ones_like(degrees.tp)
    n = product.outputs / (tp if product.split == "outputs" else 1)
    k = product.inputs / (tp if product.split == "inputs" else 1)
    if not product.is_routed:
        ones = np.ones_like(tokens)
        return tokens, n * ones, k * ones, ones, shape.narrowest / degrees.tp
    experts = shape.num_experts / degrees.ep
    return tokens * shape.top_k / experts, n * np.ones_like(tokens), k * np.ones_like(tokens), experts, np.minimum(n, k)


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
    speed = profile.vendor_attention if kernel is AttentionKernel.CUDNN else _KERNEL_SPEED.get(kernel, 1.0)
    if not profile.attention_rates:
        seconds = flops / (peak * profile.attention_efficiency * speed)
        return seconds, _BACKWARD_ATTENTION * seconds
    speed *= NARROW_HEAD_SHARE if shape.head_dim < WIDE_HEAD else 1.0
    lengths = sorted(profile.attention_rates)
    forward, backward = (
        speed
        * float(np.interp(math.log(shape.seq_len), np.log(lengths), [profile.attention_rates[n][i] for n in lengths]))
        for i in (0, 1)
    )
    return flops / forward, _BACKWARD_ATTENTION * flops / backward


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
