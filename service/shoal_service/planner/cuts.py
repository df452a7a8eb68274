"""Where a pipeline is cut: the blocks of each stage, so that the slowest rank is as fast as possible.

The first stage also has the embedding, which costs almost nothing. The last one has the norm and the head, which may
cost as much as several blocks. A cut depends on (pp, stages per rank) only, because the other axes scale all blocks and
the head equally. So a few dozen cuts are enough for all layouts of a world. `candidates` calls `cut`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from shoal_service.planner.shape import BlockShape, ModelShape


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
    extremes: tuple[Content, Content, Content]
    """One of these ranks needs the most memory: the first, the one with the most parameters after it, the last."""


def cut(shape: ModelShape, pp: int, per_rank: int, *, is_v_shaped: bool) -> Cut:
    """`per_rank` stages on each of `pp` ranks; needs pp x per_rank <= num_blocks."""
    stages = balanced(_block_costs(shape), pp * per_rank, last_extra=shape.head_flops)
    contents = tuple(_content(shape, stages, pp, rank, is_v_shaped) for rank in range(pp))
    slowest = max(contents, key=lambda content: (_cost(shape, content), -content.rank))
    heaviest = max(contents[1:] or contents, key=lambda content: (_params(shape, content), -content.rank))
    return Cut(stages if pp > 1 else (), slowest, (contents[0], heaviest, contents[-1]))


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
    """From the last stage to the first, each as full as `limit` allows, with at least one block left for each other."""
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
    return [_flops(shape.dense)] * shape.num_dense + [_flops(shape.moe)] * shape.num_moe


def _content(shape: ModelShape, stages: tuple[int, ...], pp: int, rank: int, is_v_shaped: bool) -> Content:
    starts = [0, *accumulate(stages)]
    stages_here = (rank, 2 * pp - 1 - rank) if is_v_shaped else tuple(range(rank, len(stages), pp))
    dense = sum(max(0, min(starts[i + 1], shape.num_dense) - starts[i]) for i in stages_here)
    blocks = sum(stages[i] for i in stages_here)
    return Content(rank, dense, blocks - dense, 0 in stages_here, len(stages) - 1 in stages_here)


def _cost(shape: ModelShape, content: Content) -> float:
    blocks = content.num_dense * _flops(shape.dense) + content.num_moe * _flops(shape.moe)
    return blocks + (shape.head_flops if content.has_head else 0.0)


def _params(shape: ModelShape, content: Content) -> int:
    return content.num_dense * shape.dense.params + content.num_moe * shape.moe.params


def _flops(block: BlockShape) -> float:
    return block.dense_flops + block.expert_flops + block.attention_flops
