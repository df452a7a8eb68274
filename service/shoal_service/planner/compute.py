"""Seconds of the arithmetic of one micro-batch on one rank: matrix products by shape, attention by length, the rest.

On a GPU a product of M x N x K is cut into tiles, of which each multiprocessor computes one at a time, so the time is
that of whole waves of tiles. A tile that is finished is written at memory bandwidth, which costs as much as
rate / bandwidth more terms of its inner dimension (CUTLASS, "Efficient GEMM in CUDA"; NVIDIA's guide "Matrix
Multiplication Background", wave quantization). The rate of large products is measured (`gpus`). Hardware without a
number of multiprocessors has one formula for all shapes, by the narrowest side.

Rows that have the same tp, cp and ep have the same times, so each combination is computed once. `step_time` calls it.
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
"""Rows and columns of a tile, and its rate relative to the largest: smaller ones read more for each operation. The
shares are a judgement."""
IMBALANCE = 1.1
"""Load of the busiest rank of experts relative to the mean, with a balanced router."""
_SPLIT_BACKWARD = 1.08
"""zbv and dualpipev run the backward pass in two halves, which cannot be compiled (torch 2.13)."""
_BACKWARD_ATTENTION = 2.5
"""Operations of the backward pass of fused attention, which computes the scores again, relative to the forward pass."""
_SCORE_TRAFFIC = (13, 19)
"""Bytes moved for each score that is written, forward and backward, 2 bytes each: product, softmax, dropout and its
mask (1), and product; and their gradients."""
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
    """Seconds of one block: matrix products of the forward pass, of the gradients of inputs and of weights; attention
    forward and backward; all else of the forward pass."""

    products: Floats
    inputs: Floats
    weights: Floats
    attention: Floats
    attention_backward: Floats
    rest: Floats

    def __getitem__(self, index: Ints) -> _BlockTimes:
        return _BlockTimes(*(times[index] for times in self._columns()))

    def __add__(self, other: _BlockTimes) -> _BlockTimes:
        return _BlockTimes(*(a + b for a, b in zip(self._columns(), other._columns(), strict=True)))

    def times(self, number: Ints) -> _BlockTimes:
        return _BlockTimes(*(number * times for times in self._columns()))

    def _columns(self) -> tuple[Floats, ...]:
        return (self.products, self.inputs, self.weights, self.attention, self.attention_backward, self.rest)


@dataclass(frozen=True)
class _Split:
    """The distinct combinations of degrees that split a block."""

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
    """Seconds with a processor for each rank."""
    base = int(columns.world_size.max(initial=1)) + 1
    keys = (columns.tp * base + columns.cp) * base + columns.ep
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    split = _Split(columns.tp[first], columns.cp[first], columns.ep[first])
    rate = profile.peak_flops[precision] * profile.matmul_efficiency
    kinds = ((shape.num_dense, shape.dense, content.num_dense), (shape.num_moe, shape.moe, content.num_moe))
    blocks = [
        _block(shape, kind, work, precision, profile, split)[index].times(here)
        for number, kind, here in kinds
        if number
    ]
    times = blocks[0] + blocks[1] if len(blocks) > 1 else blocks[0]
    tokens = work.micro_size * shape.seq_len / split.cp
    width = np.ceil(shape.vocab_size / split.tp)
    logits = _product(profile, rate, tokens, width, np.full_like(tokens, shape.dim), shape.narrowest / split.tp)
    logits = logits + tokens / split.tp * shape.vocab_size * 2 * _FP32 / profile.memory_bandwidth
    head = content.has_head * logits[index]
    launch = (content.num_dense + content.num_moe) * profile.block_overhead_s
    forward = times.products + times.attention + times.rest + head + launch / 3
    backward = times.inputs + times.weights + times.attention_backward + 2 * times.rest
    backward = backward + (1 + work.holding.dense.trained) * head + launch * 2 / 3
    is_split = columns.is_schedule(Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V) & (columns.pp > 1)
    backward = backward * np.where(is_split, _SPLIT_BACKWARD, 1.0)
    again = np.zeros(len(columns)) + times.attention * (work.stack.attention is AttentionKernel.UNFUSED)
    selective = times.rest + (1 - work.stack.selective_share) * times.products
    by_mode = {
        Recompute.NONE: again,
        Recompute.SELECTIVE: again + selective,
        Recompute.FULL: times.products + times.attention + times.rest,
    }
    slowest = _slowest(columns.world_size, profile)
    recompute = np.choose(columns.recompute, [by_mode[mode] for mode in RECOMPUTES])
    return Pass(slowest * forward, slowest * backward, slowest * recompute)


def _slowest(world_size: Ints, profile: HardwareProfile) -> Floats:
    """Time of the slowest of so many equal devices, relative to a typical one: the expected largest of normally
    distributed times (Blom 1958)."""
    worlds, index = np.unique(world_size, return_inverse=True)
    quantiles = [NormalDist().inv_cdf((size - 0.375) / (size + 0.25)) if size > 1 else 0.0 for size in worlds]
    return (1 + profile.spread * np.array(quantiles))[index.reshape(-1)]


def _block(
    shape: ModelShape, kind: BlockShape, work: Work, precision: Precision, profile: HardwareProfile, split: _Split
) -> _BlockTimes:
    tokens = work.micro_size * shape.seq_len / split.cp
    peak, stack, holding = profile.peak_flops[precision], work.stack, work.holding
    rate = peak * profile.matmul_efficiency * (profile.fp8_speed if stack.fp8 else 1.0)
    forward, inputs, weights = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(tokens)
    for product in kind.products:
        m, n, k, groups, width = _sides(shape, product, split, tokens)
        count = product.count * (IMBALANCE if product.is_routed else 1.0)
        trained = (holding.experts if product.is_routed else holding.dense).trained
        casts = _CAST_BYTES * stack.fp8 * groups / profile.memory_bandwidth
        # what tp gathers is cast before
        of_inputs, of_outputs = (split.tp if product.split == side else 1 for side in ("outputs", "inputs"))
        casts = casts * np.array([m * k / of_inputs + n * k, m * n / of_outputs])
        forward = forward + count * (_product(profile, rate, m, n, k, width, groups) + casts[0])
        inputs = inputs + count * (_product(profile, rate, m, k, n, width, groups) + casts[1])
        weights = weights + count * trained * _product(profile, rate, k, n, m, width, groups)
    attention, attention_backward = _attention(shape, kind, work, peak, rate, profile, split)
    # traffic goes with what one kernel for each operation saves; without sequence parallelism tp repeats the norms
    eager = Stack(is_sequence_parallel=stack.is_sequence_parallel)
    rest = 1.5 * stack.elementwise * tokens * saved_bytes(kind.saved, split.tp, work.compute_bytes, eager)
    return _BlockTimes(forward, inputs, weights, attention, attention_backward, rest / profile.memory_bandwidth)


def _sides(
    shape: ModelShape, product: Product, split: _Split, tokens: Floats
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Tokens, outputs and inputs of a product on one rank, the number of such products, and its narrowest side."""
    tp = split.tp if product.split else np.ones_like(split.tp)
    n = product.outputs / (tp if product.split == "outputs" else 1)
    k = product.inputs / (tp if product.split == "inputs" else 1)
    if not product.is_routed:
        one = np.ones_like(tokens)
        return tokens, n * one, k * one, one, shape.narrowest / split.tp
    experts = shape.num_experts / split.ep
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
    """Seconds of `groups` products of m x k by k x n."""
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
    split: _Split,
) -> tuple[Floats, Floats]:
    tokens = work.micro_size * shape.seq_len / split.cp
    heads = 1 if shape.attention_is_whole else split.tp
    kernel = work.stack.attention
    if kernel is AttentionKernel.UNFUSED and profile.multiprocessors:
        return _unfused(shape, work, rate, profile, split)
    flops = tokens / heads * kind.attention_flops
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
    shape: ModelShape, work: Work, rate: float, profile: HardwareProfile, split: _Split
) -> tuple[Floats, Floats]:
    """Both products of all heads, causal or not, and the traffic of the scores between them."""
    groups = work.micro_size * shape.num_heads / split.tp
    rows, keys, dim = (np.full_like(groups, size) for size in (shape.seq_len, shape.seq_len, shape.head_dim))
    rows = rows / split.cp
    products = _product(profile, rate, rows, keys, dim, dim, groups) + _product(
        profile, rate, rows, dim, keys, dim, groups
    )
    forward, backward = (traffic * groups * rows * keys / profile.memory_bandwidth for traffic in _SCORE_TRAFFIC)
    return products + forward, 2 * products + backward
