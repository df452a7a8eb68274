"""All legal layouts of a world, as columns: one array for each axis and choice, one entry for each layout.

A world of 16,384 ranks has several hundred thousand layouts. Only the degrees are made one by one (a few thousand
tuples); repeated arrays combine them with the other choices. No result breaks a rule of
`shoal_workers.contract.checks.legality`; a test checks each of them. `ranking` calls `candidates`.

Some layouts are left out because the engine would do the same for them: other shard levels if nothing is sharded
(dp_shard x cp is 1) or with a pipeline, which keeps parameters and gradients whole until the end of a step; schedules
without a pipeline; context methods without cp.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, product

import numpy as np
from numpy.typing import NDArray

from shoal_service.planner.shape import ModelShape
from shoal_workers.contract.checks.legality import LegalDegrees
from shoal_workers.contract.layout import (
    MAX_PADDING,
    WHOLE_STATE,
    ContextMethod,
    Layout,
    ParallelismSpec,
    Recompute,
    Schedule,
    ShardLevel,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LEVELS, SCHEDULES, RECOMPUTES, CONTEXTS = (tuple(ShardLevel), tuple(Schedule), tuple(Recompute), tuple(ContextMethod))
_PIPELINES = (
    (Schedule.GPIPE, 1),
    (Schedule.ONE_F_ONE_B, 1),
    (Schedule.INTERLEAVED, 2),
    (Schedule.INTERLEAVED, 3),
    (Schedule.INTERLEAVED, 4),
    (Schedule.INTERLEAVED, 8),
    (Schedule.INTERLEAVED, 0),
    (Schedule.ZERO_BUBBLE_V, 2),
    (Schedule.DUAL_PIPE_V, 2),
)
"""Schedules, each with the number of stages on one rank; 0: as many as there are blocks."""


@dataclass(frozen=True)
class Candidates:
    """Columns of equal length. `level`, `schedule`, `recompute` and `context` are indexes into the tuples above."""

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    level: Ints
    schedule: Ints
    per_rank: Ints
    """Pipeline stages on each rank."""
    recompute: Ints
    context: Ints
    cut: Ints
    """Index into `cuts`."""
    fed: Ints
    """Micro-batches that each rank runs in a step, padding included."""
    cuts: tuple[Cut, ...]
    offload: bool = False

    def __len__(self) -> int:
        return len(self.pp)

    @cached_property
    def folds_experts(self) -> np.ndarray:
        """A mask: ep takes its ranks from tp, cp and dp_shard, in that order, and tp splits no expert (MoE Parallel
        Folding, Liu et al. 2025)."""
        mask: np.ndarray = self.dp_shard % self.ep > 0
        return mask

    @cached_property
    def token_parts(self) -> Ints:
        """Parts into which tp splits the tokens that it sends to experts."""
        return np.where(self.folds_experts, self.tp, 1)

    @property
    def expert_shards(self) -> Ints:
        """Number of parts that the data axes cut an expert into."""
        return self.shards * self.token_parts // self.ep

    @property
    def shards(self) -> Ints:
        """Number of parts that parameters are cut into: the engine counts cp to the sharding axis."""
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> Ints:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    def is_schedule(self, *schedules: Schedule) -> np.ndarray:
        return np.isin(self.schedule, [SCHEDULES.index(schedule) for schedule in schedules])

    def layout(self, index: int) -> Layout:
        """One row as the value that the engine gets."""
        pp = int(self.pp[index])
        return Layout(
            pp=pp,
            dp_replicate=int(self.dp_replicate[index]),
            dp_shard=int(self.dp_shard[index]),
            cp=int(self.cp[index]),
            tp=int(self.tp[index]),
            ep=int(self.ep[index]),
            shard=LEVELS[self.level[index]],
            schedule=SCHEDULES[self.schedule[index]],
            stages=self.cuts[self.cut[index]].stages,
            context=CONTEXTS[self.context[index]],
            recompute=RECOMPUTES[self.recompute[index]],
            offload=self.offload,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What limits the choice."""

    degrees: LegalDegrees
    num_micro_batches: int
    max_tp: int
    """Ranks of a node, since tp communicates in every layer. A fixed degree may be larger."""
    fixed: ParallelismSpec | None = None
    """Degrees and choices that the spec fixes."""
    nodes: tuple[int, ...] = ()
    """Workers of each node. (): as many nodes of `max_tp` workers as are needed."""
    tp_may_cross: bool = False
    """tp groups may be on several nodes."""
    may_be_plain: bool = False
    """Workers may have the whole state, and train the task's own module."""
    refused: tuple[frozenset[str], ...] = ()
    """Features of each layout that a proof has refused."""
    folds_experts: bool = False
    """ep may take ranks from tp and cp, which the engine refuses."""

    def holds(self, tp: int, world: int) -> bool:
        """Return True if the nodes have room for all tp groups of a world, none of them on two nodes.

        Also True if the spec fixes the degrees, so the nodes need not have room.
        """
        if self.fixed is not None:
            return True
        if self.tp_may_cross or tp > self.max_tp:
            return tp <= self.max_tp
        if not self.nodes:
            return self.max_tp // tp * -(-world // self.max_tp) >= world // tp
        return sum(size // tp for size in self.nodes) >= world // tp


def candidates(shape: ModelShape, limits: Limits, worlds: Iterable[int], *, offload: bool = False) -> Candidates:
    """Return every legal layout of each world; there may be none."""
    degrees = np.array(sorted({d for world in worlds for d in _degrees(limits, world)}), np.int64).reshape(-1, 6)
    crossed = [_cross(degrees[(degrees[:, 0] > 1) == has_pp][:, :], has_pp, limits.fixed) for has_pp in (False, True)]
    table = np.concatenate(crossed)
    pp, replicate, shard, cp, tp, ep, level, schedule, per_rank, recompute, context = table.T
    most, is_most = shape.num_blocks // pp, per_rank == 0
    repeats = is_most & ((most < 2) | np.isin(most, [number for _, number in _PIPELINES]))
    per_rank = np.where(is_most, most, per_rank)
    share = -(-limits.num_micro_batches // (replicate * shard))
    fed = fed_micro_batches(schedule, pp, per_rank, share)
    legal = (pp * per_rank <= shape.num_blocks) & (fed <= MAX_PADDING * share) & ~repeats
    legal &= (context == CONTEXTS.index(ContextMethod.ALL_GATHER)) | ((shape.num_heads // tp) % cp == 0) & (cp > 1)
    is_plain, is_whole = level == LEVELS.index(ShardLevel.NONE), (shard * cp * tp * pp == 1) & limits.may_be_plain
    has_effect = (level == LEVELS.index(ShardLevel.OPTIMIZER)) & ~is_whole | (shard * cp > 1)
    legal &= np.where(is_plain, is_whole, has_effect | _is_fixed(limits.fixed, "shard"))
    for features in limits.refused:
        has_all = _have_features(features, {"pp": pp, "cp": cp, "tp": tp, "ep": ep}, schedule, context)
        legal &= ~(has_all & is_plain if WHOLE_STATE in features else has_all)
    cuts, cut_index = _cuts(shape, pp[legal], per_rank[legal], schedule[legal])
    columns = Candidates(
        pp,
        replicate,
        shard,
        cp,
        tp,
        ep,
        level,
        schedule,
        per_rank,
        recompute,
        context,
        np.zeros_like(pp),
        fed,
        (),
        offload,
    )
    return replace(select_rows(columns, legal), cut=cut_index, cuts=cuts)


def _have_features(features: frozenset[str], degrees: dict[str, Ints], schedule: Ints, context: Ints) -> np.ndarray:
    """Return a mask of the layouts with all these features: `Layout.features` for columns. A test compares the two."""
    mask = np.ones(len(schedule), dtype=bool)
    for axis, degree in degrees.items():
        if axis in features:
            mask &= degree > 1
    schedules = [n for n, name in enumerate(SCHEDULES) if features & Layout(pp=2, schedule=name).features - {"pp"}]
    if schedules:
        mask &= np.isin(schedule, schedules)
    methods = [n for n, method in enumerate(CONTEXTS) if features & Layout(cp=2, context=method).features - {"cp"}]
    if methods:
        mask &= np.isin(context, methods)
    return mask


def select_rows(columns: Candidates, chosen: np.ndarray) -> Candidates:
    """Return the chosen rows of all columns. `chosen`: a mask, or row numbers."""
    arrays = {f.name: getattr(columns, f.name) for f in fields(columns)}
    return replace(columns, **{name: a[chosen] for name, a in arrays.items() if isinstance(a, np.ndarray)})


def _degrees(limits: Limits, world: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(pp, dp_replicate, dp_shard, cp, tp, ep) that multiply to `world`."""
    legal, fixed = limits.degrees, limits.fixed
    for tp, cp, pp in product(
        _requested_degrees(legal.tp, fixed, "tp"),
        _requested_degrees(legal.cp, fixed, "cp"),
        _requested_degrees(legal.pp, fixed, "pp"),
    ):
        ranks, left = divmod(world, tp * cp * pp)
        if (
            left
            or not 1 <= ranks <= limits.num_micro_batches
            or not limits.holds(tp, world)
            or not legal.together(tp, cp)
        ):
            continue
        for shard in _divisors(ranks):
            if fixed is not None and not _is_requested(fixed, ranks // shard, shard):
                continue
            for ep in _requested_degrees(legal.ep, fixed, "ep"):
                if shard % ep == 0 or (limits.folds_experts and ep % tp == 0 and cp * shard % (ep // tp) == 0):
                    yield pp, ranks // shard, shard, cp, tp, ep


def _is_requested(fixed: ParallelismSpec, replicate: int, shard: int) -> bool:
    if fixed.shard is ShardLevel.NONE:
        return shard == 1
    return fixed.dp_replicate == replicate and fixed.dp_shard in ("auto", shard)


def _requested_degrees(legal: tuple[int, ...], fixed: ParallelismSpec | None, axis: str) -> tuple[int, ...]:
    if fixed is None:
        return legal
    degree = getattr(fixed, axis)
    return (degree,) if degree in legal else ()


def _divisors(size: int) -> list[int]:
    small = [n for n in range(1, int(size**0.5) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})


def _cross(degrees: Ints, has_pp: bool, fixed: ParallelismSpec | None) -> Ints:
    """Each row of degrees with each combination of the other choices."""
    pipelines = [
        (SCHEDULES.index(schedule), per_rank)
        for schedule, per_rank in (_PIPELINES if has_pp else ((Schedule.ONE_F_ONE_B, 1),))
        if not has_pp or not _is_fixed(fixed, "schedule") or schedule is fixed.schedule  # type: ignore[union-attr]
    ]
    levels = [LEVELS.index(ShardLevel.OPTIMIZER)] if has_pp and not _is_fixed(fixed, "shard") else None
    options = [
        (level, schedule, per_rank, recompute, context)
        for level in (levels or _choices_of(LEVELS, fixed, "shard"))
        for schedule, per_rank in pipelines
        for recompute in _choices_of(RECOMPUTES, fixed, "recompute")
        for context in range(len(CONTEXTS))
    ]
    choices = np.array(options, np.int64).reshape(-1, 5)
    rows = np.hstack([np.repeat(degrees, len(choices), axis=0), np.tile(choices, (len(degrees), 1))])
    if not _is_fixed(fixed, "context"):
        return rows
    method = CONTEXTS.index(fixed.context)  # type: ignore[union-attr]
    chosen: Ints = rows[(rows[:, -1] == method) | ((rows[:, 3] == 1) & (rows[:, -1] == 0))]
    return chosen


def _choices_of(values: tuple[object, ...], fixed: ParallelismSpec | None, name: str) -> list[int]:
    return [values.index(getattr(fixed, name))] if _is_fixed(fixed, name) else list(range(len(values)))


def _is_fixed(fixed: ParallelismSpec | None, name: str) -> bool:
    return fixed is not None and getattr(fixed, name) != "auto"


def fed_micro_batches(schedule: Ints, pp: Ints, per_rank: Ints, share: Ints) -> Ints:
    """`shoal_workers.contract.layout.fed` for columns; a test compares the two."""
    rounds = np.maximum(1, share // pp)
    interleaved = np.minimum(-(-share // rounds) * rounds, np.maximum(share, (rounds + 1) * pp))
    fills_up = np.isin(schedule, [SCHEDULES.index(s) for s in (Schedule.ONE_F_ONE_B, Schedule.DUAL_PIPE_V)])
    fed = np.where(fills_up, np.maximum(share, pp * per_rank), share)
    fed = np.where(schedule == SCHEDULES.index(Schedule.INTERLEAVED), interleaved, fed)
    return np.where(pp > 1, fed, share)


def _cuts(shape: ModelShape, pp: Ints, per_rank: Ints, schedule: Ints) -> tuple[tuple[Cut, ...], Ints]:
    is_v = np.isin(schedule, [SCHEDULES.index(s) for s in SCHEDULES if s.is_v_shaped]).astype(np.int64)
    keys, first, index = np.unique(
        (pp * (per_rank.max(initial=0) + 1) + per_rank) * 2 + is_v, return_index=True, return_inverse=True
    )
    cuts = tuple(cut(shape, int(pp[i]), int(per_rank[i]), is_v_shaped=bool(is_v[i])) for i in first)
    assert len(cuts) == len(keys)
    return cuts, index.reshape(-1)


@dataclass(frozen=True, slots=True)
class Content:
    """The parts of the model on one pipeline rank."""

    rank: int
    num_dense: int
    num_moe: int
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut a model."""

    stages: tuple[int, ...]
    """Blocks of each stage in the model's order; () for one stage."""
    slowest: Content
    """The rank with the most arithmetic."""
    inner: Content
    """The same of the ranks without embedding and head; `slowest` if there is none."""
    extremes: tuple[Content, Content, Content]
    """One of these ranks needs the most memory: the first, the one with the most parameters after it, the last."""
    evenness: tuple[float, float] = (1.0, 1.0)
    """Arithmetic of the mean rank, relative to the slowest; with full recomputation, which leaves the head out."""


def cut(shape: ModelShape, pp: int, per_rank: int, *, is_v_shaped: bool) -> Cut:
    """Where a pipeline is cut: the blocks of each stage, so that the slowest rank is as fast as possible.

    The first stage also has the embedding, which costs almost nothing. The last one has the norm and the head, which
    may cost as much as several blocks. A cut depends on (pp, stages per rank) only, because the other axes scale all
    blocks and the head equally. So a few dozen cuts are enough for all layouts of a world.

    `per_rank` stages on each of `pp` ranks; needs pp x per_rank <= num_blocks.
    """
    return cut_at(shape, balanced(_block_costs(shape), pp * per_rank, last_extra=shape.head_flops), pp, is_v_shaped)


def cut_at(shape: ModelShape, stages: tuple[int, ...], pp: int, is_v_shaped: bool = False) -> Cut:
    """The cut with these blocks in each stage."""
    contents = tuple(_content(shape, stages, pp, rank, is_v_shaped) for rank in range(pp))
    slowest = max(contents, key=lambda content: (_cost(shape, content), -content.rank))
    heaviest = max(contents[1:] or contents, key=lambda content: (_params(shape, content), -content.rank))
    evenness = _evenness(shape, contents, slowest, 1.0), _evenness(shape, contents, slowest, _RECOMPUTED)
    inner = max(contents[1:-1], key=lambda content: (_cost(shape, content), -content.rank), default=slowest)
    return Cut(stages if pp > 1 else (), slowest, inner, (contents[0], heaviest, contents[-1]), evenness)


def balanced(costs: list[float], num_stages: int, last_extra: float = 0.0) -> tuple[int, ...]:
    """Sizes of `num_stages` runs of blocks, each at least 1, whose largest cost is as small as possible.

    `last_extra` is added to the last run. Of equal cuts the one with lighter early stages is taken, since early stages
    have the most micro-batches in flight.
    """
    assert 1 <= num_stages <= len(costs)
    total = [0.0, *accumulate(costs)]
    low, high = max(max(costs), costs[-1] + last_extra), total[-1] + last_extra
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _sizes(total, num_stages, last_extra, middle) else (middle, high)
    even = _even(total, num_stages, last_extra, high)
    sizes = even or _sizes(total, num_stages, last_extra, high)
    assert sizes is not None
    return sizes


def _even(total: list[float], num_stages: int, last_extra: float, limit: float) -> tuple[int, ...] | None:
    """Each stage as near as possible to the mean of what is left, within `limit`; None if there is no such cut."""
    end, sizes = len(total) - 1, []
    for stage in range(num_stages - 1, -1, -1):
        extra = last_extra if stage == num_stages - 1 else 0.0
        mean = (total[end] + extra) / (stage + 1) - extra
        size = end - max(stage, bisect_left(total, total[end] - mean * (1 - 1e-9)) - 1) if stage else end
        while size > 1 and total[end] - total[end - size] + extra > limit * (1 + 1e-6):
            size -= 1
            if stage == 0:
                return None
        if size < 1 or total[end] - total[end - size] + extra > limit * (1 + 1e-6):
            return None
        sizes.append(size)
        end -= size
    return tuple(reversed(sizes)) if end == 0 else None


def _sizes(total: list[float], num_stages: int, last_extra: float, limit: float) -> tuple[int, ...] | None:
    """Fill the stages from the last to the first, each as full as `limit` allows, with at least one block left for each
    other."""
    end, sizes = len(total) - 1, []
    for stage in range(num_stages - 1, -1, -1):
        room = limit * (1 + 1e-12) - (last_extra if stage == num_stages - 1 else 0.0)
        start = max(stage, bisect_right(total, total[end] - room - 1e-9 * room))
        if total[start] < total[end] - room * (1 + 1e-9):
            start += 1
        if stage == 0:
            start = 0
            if total[end] > room * (1 + 1e-9):
                return None
        if start >= end:
            return None
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes))


def _block_costs(shape: ModelShape) -> list[float]:
    return [shape.dense.flops] * shape.num_dense + [shape.moe.flops] * shape.num_moe


def _content(shape: ModelShape, stages: tuple[int, ...], pp: int, rank: int, is_v_shaped: bool) -> Content:
    starts = [0, *accumulate(stages)]
    stages_here = (rank, 2 * pp - 1 - rank) if is_v_shaped else tuple(range(rank, len(stages), pp))
    dense = sum(max(0, min(starts[i + 1], shape.num_dense) - starts[i]) for i in stages_here)
    blocks = sum(stages[i] for i in stages_here)
    return Content(rank, dense, blocks - dense, 0 in stages_here, len(stages) - 1 in stages_here)


def _evenness(shape: ModelShape, contents: tuple[Content, ...], slowest: Content, weight: float) -> float:
    total = sum(_cost(shape, content, weight) for content in contents)
    return total / (len(contents) * _cost(shape, slowest, weight))


_RECOMPUTED = 4 / 3
"""Arithmetic of a block with a second forward pass, relative to one without."""


def _cost(shape: ModelShape, content: Content, weight: float = 1.0) -> float:
    """Return the operations of a rank for one token, forward. `weight`: of its blocks."""
    blocks = content.num_dense * shape.dense.flops + content.num_moe * shape.moe.flops
    return weight * blocks + (shape.head_flops if content.has_head else 0.0)


def _params(shape: ModelShape, content: Content) -> int:
    return content.num_dense * shape.dense.params + content.num_moe * shape.moe.params
