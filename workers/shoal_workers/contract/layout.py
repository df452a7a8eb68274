"""What a parallel axis is: its degree in the spec (`ParallelismSpec`) and in a `Layout`, which ranks it connects, which
of them should be near each other, whether it needs a plan of the model. Pure data: users fix degrees, the planner makes
layouts, and the engine builds the mesh from them.

    rank = ((((pp * dp_replicate) + ..) * dp_shard + ..) * cp + ..) * tp + ..      tp varies fastest, pp slowest

The world size does not contain `ep`: the experts of a layer are distributed over groups of `ep` neighbours along
dp_shard, so dp_shard must be a multiple of ep.

A layout also fixes how many micro-batches its pipeline schedule needs, and how many stages it has; legality rules,
planner and engine use the same numbers. Requirements of torch 2.13 (torch/distributed/pipelining/schedules.py):

    gpipe               nothing
    1f1b                at least as many micro-batches as stages
    interleaved_1f1b    a multiple of the number of rounds, max(1, micro-batches // pp)
    zbv                 nothing: it plans 2 pp - 1 time slots, and skips those without a micro-batch
    dualpipev           at least as many micro-batches as stages, which are 2 pp

If a rank has fewer micro-batches, padding micro-batches of weight zero are added: they cost time, but are no error.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import product
from typing import Literal

from pydantic import Field

from shoal_workers.contract.base import Frozen, PositiveInt

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""The fields of `Layout` that are degrees, outermost first; ep uses ranks of dp_shard."""
PLANNED_AXES = ("pp", "cp", "tp", "ep")
"""Axes that split a model by its plan. The data axes need none."""
BY_LOCALITY = ("cp", "ep", "pp", "dp_shard", "dp_replicate")
"""The axes beside tp, in the order in which the tp groups that they connect are put next to each other: tp communicates
in every layer, cp and ep in every block, pp between stages, the data axes once a step."""
_SHORT = {"dp_replicate": "dp", "dp_shard": "fsdp"}
"""Axes that people call by another name."""
WHOLE_STATE = "whole state"
"""A feature of layouts without any split state: `engine/model/whole_state.py` refuses it if the whole does not fit."""


class ShardLevel(StrEnum):
    """What is sharded along dp_shard (Rajbhandari et al. 2020). The rest is whole on every rank during a step."""

    OPTIMIZER = "optimizer"
    """ZeRO-1: parameters are gathered once a step, gradients are summed once a step."""
    GRADIENTS = "gradients"
    """ZeRO-2: parameters are gathered once a step, gradients are summed and sharded after every micro-batch."""
    FULL = "full"
    """ZeRO-3: parameters are gathered unit by unit in each forward and backward pass; gradients as in ZeRO-2."""
    NONE = "none"
    """Nothing: every worker has the whole state and trains the task's own module and parameters. Gradients are summed
    once a step, and the update runs on every worker."""


class Schedule(StrEnum):
    """The order in which a pipeline's stages run their micro-batches."""

    GPIPE = "gpipe"
    """GPipe (Huang et al. 2019): all forward passes, then all backward passes."""
    ONE_F_ONE_B = "1f1b"
    """One forward, one backward (Narayanan et al. 2019)."""
    INTERLEAVED = "interleaved_1f1b"
    """1F1B with several stages on each rank (Narayanan et al. 2021)."""
    ZERO_BUBBLE_V = "zbv"
    """Zero bubble (Qi et al. 2024): two stages on each rank, the second ones in reverse order of the ranks."""
    DUAL_PIPE_V = "dualpipev"
    """The half of DualPipe (DeepSeek-AI 2024) that needs no second copy of the model; two stages per rank, as zbv."""

    @property
    def is_v_shaped(self) -> bool:
        """True if pipeline rank r holds the stages r and 2 pp - 1 - r."""
        return self in (Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V)


class ContextMethod(StrEnum):
    """How attention reads the tokens of other context-parallel ranks."""

    ALL_GATHER = "all_gather"
    """Keys and values are gathered; each rank computes the rows of its own queries."""
    ULYSSES = "ulysses"
    """Heads are exchanged for tokens and back (Jacobs et al. 2023); cp must divide the number of heads per tp rank."""


class Recompute(StrEnum):
    """Activation checkpointing (Chen et al. 2016), block by block."""

    NONE = "none"
    SELECTIVE = "selective"
    """Outputs of matrix products and attention are kept; the backward pass recomputes everything else."""
    FULL = "full"
    """Only the input of each block is kept."""


class ParallelismSpec(Frozen):
    """Fixed degrees. If the world size is not their product, `otherwise` decides."""

    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP)."""
    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """Ways to shard the model; "auto": the world size divided by the other degrees."""
    tp: PositiveInt = 1
    """Tensor parallel ranks, with sequence-parallel activations."""
    pp: PositiveInt = 1
    """Pipeline ranks."""
    cp: PositiveInt = 1
    """Context parallel ranks, which split each sequence."""
    ep: PositiveInt = 1
    """Expert parallel ranks; must divide dp_shard."""
    shard: ShardLevel | Literal["auto"] = "auto"
    """What dp_shard splits: optimizer state (ZeRO-1), also gradients (ZeRO-2), or also parameters: full (ZeRO-3). none:
    nothing is split, and every worker trains the task's own module; then no degree may be set."""
    schedule: Schedule | Literal["auto"] = "auto"
    """The pipeline schedule."""
    recompute: Recompute | Literal["auto"] = "auto"
    """Activation checkpointing."""
    context: ContextMethod | Literal["auto"] = "auto"
    """How attention reads the tokens of other context-parallel ranks."""
    offload: bool = False
    """Keep parameters and optimizer state in CPU memory between their uses."""
    otherwise: Literal["replan", "idle"] = "replan"
    """If the degrees do not fit the world size, for example after a worker was lost: choose other degrees, or keep the
    degrees and leave the surplus ranks idle."""

    @property
    def model_degree(self) -> int:
        """Number of ranks that share the work of one data rank."""
        return self.tp * self.pp * self.cp

    @property
    def unit(self) -> int:
        """The degrees fit every world size that is a multiple of this number; with a fixed dp_shard, only this one."""
        if self.shard is ShardLevel.NONE:
            return 1
        return self.model_degree * self.dp_replicate * (1 if self.dp_shard == "auto" else self.dp_shard)


_STAGES = {
    Schedule.GPIPE: "one stage a rank",
    Schedule.ONE_F_ONE_B: "one stage a rank",
    Schedule.INTERLEAVED: "several stages a rank",
    Schedule.ZERO_BUBBLE_V: "both ends on a rank",
    Schedule.DUAL_PIPE_V: "both ends on a rank",
}
"""Which stages each schedule puts on one rank, the only difference between schedules that matters for a proof."""


class Layout(Frozen):
    """Degrees of the parallel axes, outermost first, and the choices that go with them."""

    pp: int = Field(1, ge=1)
    """Pipeline ranks."""
    dp_replicate: int = Field(1, ge=1)
    """Replicas of the (sharded) model: HSDP's outer axis."""
    dp_shard: int = Field(1, ge=1)
    """Number of shards of the optimizer state, and of what else `shard` names (FSDP2)."""
    cp: int = Field(1, ge=1)
    """Context parallel: number of parts of each sequence."""
    tp: int = Field(1, ge=1)
    """Tensor parallel, with sequence-parallel activations between the layers."""
    ep: int = Field(1, ge=1)
    """Expert parallel; divides dp_shard."""
    shard: ShardLevel = ShardLevel.FULL
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """Unused if pp is 1."""
    stages: tuple[int, ...] = ()
    """Number of blocks of each pipeline stage, in the model's order; a multiple of pp stages. (): pp even stages."""
    context: ContextMethod = ContextMethod.ALL_GATHER
    """Unused if cp is 1."""
    recompute: Recompute = Recompute.NONE
    offload: bool = False
    """Parameters and optimizer state stay in CPU memory between uses on a GPU."""

    @property
    def world_size(self) -> int:
        """Number of ranks that train."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def num_shards(self) -> int:
        """Number of shards of the dense parameters: FSDP2 shards over the ranks of cp as well."""
        return self.dp_shard * self.cp

    @property
    def mesh_degrees(self) -> tuple[int, int, int, int]:
        """Degrees of the axes of the mesh, the outermost first: pp, dp_replicate, the shards, tp."""
        return self.pp, self.dp_replicate, self.num_shards, self.tp

    @property
    def num_data_ranks(self) -> int:
        """Number of parts of a step's micro-batches; ranks along pp, cp and tp work on the same part."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Return the part of the micro-batches that `rank` works on, 0 .. num_data_ranks - 1."""
        return rank // (self.tp * self.cp) % self.num_data_ranks

    def pipeline_rank(self, rank: int) -> int:
        return rank // (self.world_size // self.pp)

    @property
    def num_distinct_shards(self) -> int:
        """Number of parts of a snapshot: ranks that differ only along dp_replicate hold the same part."""
        return self.world_size // self.dp_replicate

    def shard_of(self, rank: int) -> int:
        """Number of the snapshot part that `rank` holds, 0 .. num_distinct_shards - 1: the rank within its replica,
        pipeline stages counted through."""
        per_stage, per_replica = self.world_size // self.pp, self.num_distinct_shards // self.pp
        return rank // per_stage * per_replica + rank % per_replica

    def owns_replicated(self, rank: int) -> bool:
        """Return whether `rank` saves the tensors that are equal on all ranks of its pipeline stages."""
        return rank % (self.world_size // self.pp) == 0

    def is_first_of_stage(self, rank: int) -> bool:
        """Return whether `rank` is the first one of its pipeline stage in its replica."""
        return self.shard_of(rank) % (self.num_distinct_shards // self.pp) == 0

    def describe(self) -> str:
        """Short form for people: `fsdp4`, `pp2 x tp2`, `dp2 x fsdp2`; `fsdp1` for a single rank."""
        used = (f"{_SHORT.get(axis, axis)}{degree}" for axis in AXES if (degree := getattr(self, axis)) > 1)
        return " x ".join(used) or ("dp1" if self.shard is ShardLevel.NONE else "fsdp1")

    @property
    def planned_axes(self) -> tuple[str, ...]:
        """The axes in use that split the model by its plan."""
        return tuple(axis for axis in PLANNED_AXES if getattr(self, axis) > 1)

    @property
    def features(self) -> frozenset[str]:
        """What a proof of the layout covers: the axes of the plan that are in use, and how they are computed.

        Degrees are no features: what is wrong with tp 2 is wrong with tp 4, and other checks cover divisibility.
        """
        features = set(self.planned_axes)
        if self.pp > 1:
            features.add(_STAGES[self.schedule])
        if self.cp > 1 and self.context is not ContextMethod.ALL_GATHER:
            features.add(f"context {self.context}")
        if self.shard is ShardLevel.NONE:
            features.add(WHOLE_STATE)
        return frozenset(features)

    @property
    def loss_share(self) -> float:
        """A rank's share of a loss that every rank of its tp and cp groups has: they split the tokens of a sample."""
        return 1.0 / (self.tp * self.cp)

    def blocks(self) -> list[int]:
        """Sizes of the blocks of ranks that should be on one node as a whole, counted in tp groups, the largest first.
        A block is a group of an axis, with the groups of all axes that come before it in BY_LOCALITY."""
        sizes = [1]
        for axis in BY_LOCALITY:
            if (degree := self._outer(axis)) > 1:
                sizes.append(sizes[-1] * degree)
        return sizes[::-1]

    def tp_groups_by_locality(self) -> list[int]:
        """Numbers of all tp groups, in the order of BY_LOCALITY. The number of a rank's tp group is rank // tp."""
        strides, stride = dict[str, int](), 1
        for axis in reversed(AXES):
            if axis not in ("tp", "ep"):
                strides[axis], stride = stride, stride * int(getattr(self, axis))
        strides |= {"ep": strides["dp_shard"], "dp_shard": strides["dp_shard"] * self.ep}
        steps = ((strides[axis], self._outer(axis)) for axis in reversed(BY_LOCALITY))
        return [sum(places) for places in product(*(range(0, step * degree, step) for step, degree in steps))]

    def _outer(self, axis: str) -> int:
        """Return the degree of an axis; of dp_shard the part that ep does not use."""
        return self.dp_shard // self.ep if axis == "dp_shard" else int(getattr(self, axis))


def replicated(world_size: int) -> Layout:
    """Return the layout in which each of `world_size` ranks has everything: that of a program that splits its own
    work."""
    return Layout(dp_replicate=world_size)


def plain(world_size: int) -> Layout:
    """Return the layout in which each of `world_size` ranks trains the task's own module."""
    return Layout(dp_replicate=world_size, shard=ShardLevel.NONE)


def data_parallel(parallelism: ParallelismSpec | Literal["auto"], world_size: int) -> Layout:
    """Return the data axes alone: plain if `parallelism.shard` is none, else fully sharded."""
    is_plain = isinstance(parallelism, ParallelismSpec) and parallelism.shard is ShardLevel.NONE
    return plain(world_size) if is_plain else fully_sharded(world_size)


def fully_sharded(world_size: int) -> Layout:
    """Return the layout that shards everything over all ranks of `world_size`."""
    return Layout(dp_shard=world_size)


MAX_PADDING = 4
"""A layout is refused if its pipeline needs more than this many times the real micro-batches."""


def num_stages(layout: Layout) -> int:
    """Number of pipeline stages over all pipeline ranks."""
    return len(layout.stages) or layout.pp


def longest_share(layout: Layout, num_micro_batches: int) -> int:
    """Number of real micro-batches of the data rank that has the most."""
    return -(-num_micro_batches // layout.num_data_ranks)


def micro_batches_fed(layout: Layout, num_micro_batches: int) -> int:
    """Number of micro-batches that each data rank runs in one step, padding included."""
    share = longest_share(layout, num_micro_batches)
    if layout.pp == 1:
        return share
    return fed(layout.schedule, layout.pp, num_stages(layout), share)


def fed(schedule: Schedule, pp: int, stages: int, share: int) -> int:
    """Return the smallest number of micro-batches, at least `share`, that the schedule accepts."""
    match schedule:
        case Schedule.GPIPE | Schedule.ZERO_BUBBLE_V:
            return share
        case Schedule.ONE_F_ONE_B | Schedule.DUAL_PIPE_V:
            return max(share, stages)
        case Schedule.INTERLEAVED:
            rounds = max(1, share // pp)
            # as many rounds as now, each a little longer; or one more round of pp each
            return min(-(-share // rounds) * rounds, max(share, (rounds + 1) * pp))
