"""Layout: how many ways each axis of the mesh splits the work, and how. Pure data; the planner makes them, the engine
obeys.

    rank = ((((pp * dp_replicate) + ..) * dp_shard + ..) * cp + ..) * tp + ..      tp varies fastest, pp slowest

`ep` does not multiply into the world size: the experts of a layer are spread over groups of `ep` neighbours along
dp_shard, which therefore must be a multiple of it.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shoal_workers.contract.base import Frozen


class ShardLevel(StrEnum):
    """What is cut along dp_shard (Rajbhandari et al. 2020), and what is whole on every rank while a step runs."""

    OPTIMIZER = "optimizer"
    """ZeRO-1: parameters are gathered once a step, gradients are summed once a step."""
    GRADIENTS = "gradients"
    """ZeRO-2: parameters are gathered once a step, gradients are summed and cut after every micro-batch."""
    FULL = "full"
    """ZeRO-3: parameters are gathered unit by unit in each forward and backward pass; gradients as in ZeRO-2."""


class Schedule(StrEnum):
    """In which order a pipeline's stages run their micro-batches."""

    GPIPE = "gpipe"
    """Huang et al. 2019."""
    ONE_F_ONE_B = "1f1b"
    """Narayanan et al. 2019."""
    INTERLEAVED = "interleaved_1f1b"
    """Narayanan et al. 2021; several stages on each rank."""
    ZERO_BUBBLE_V = "zbv"
    """Qi et al. 2024; two stages on each rank, the second ones in reverse order."""
    DUAL_PIPE_V = "dualpipev"
    """DeepSeek-AI 2024, the half of DualPipe that needs no second copy; two stages on each rank, as zbv."""

    @property
    def is_v_shaped(self) -> bool:
        """Rank r holds the stages r and 2 pp - 1 - r."""
        return self in (Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V)


class ContextMethod(StrEnum):
    """How attention sees the tokens of other context-parallel ranks."""

    ALL_GATHER = "all_gather"
    """Keys and values are gathered; each rank computes its own queries' rows."""
    ULYSSES = "ulysses"
    """Heads are exchanged for tokens and back (Jacobs et al. 2023); cp must divide the heads that tp leaves."""


class Recompute(StrEnum):
    """Activation checkpointing (Chen et al. 2016), block by block."""

    NONE = "none"
    SELECTIVE = "selective"
    """Matrix products and attention are kept, everything else is computed again in the backward pass."""
    FULL = "full"
    """Only each block's input is kept."""


class Layout(Frozen):
    """Degrees of the parallel axes, outermost first, and the choices that go with them."""

    pp: int = Field(1, ge=1)
    """Pipeline ranks."""
    dp_replicate: int = Field(1, ge=1)
    """Replicas of the (sharded) model: HSDP's outer axis."""
    dp_shard: int = Field(1, ge=1)
    """Ways that optimizer state, and what else `shard` says, is cut (FSDP2)."""
    cp: int = Field(1, ge=1)
    """Context parallel: ways that one sequence is split."""
    tp: int = Field(1, ge=1)
    """Tensor parallel, with sequence parallel activations in between."""
    ep: int = Field(1, ge=1)
    """Expert parallel; divides dp_shard."""
    shard: ShardLevel = ShardLevel.FULL
    schedule: Schedule = Schedule.ONE_F_ONE_B
    """Means nothing where pp is 1."""
    stages: tuple[int, ...] = ()
    """Blocks of each pipeline stage, in the model's order, a multiple of pp of them; (): pp stages cut evenly."""
    context: ContextMethod = ContextMethod.ALL_GATHER
    """Means nothing where cp is 1."""
    recompute: Recompute = Recompute.NONE
    offload: bool = False
    """Parameters and optimizer state stay in CPU memory between their uses on a GPU."""

    @property
    def world_size(self) -> int:
        """Ranks that train."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Ways that a step's micro-batches are partitioned; ranks along pp, cp and tp share theirs."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """0 .. num_data_ranks - 1: whose micro-batches `rank` works on."""
        return rank // (self.tp * self.cp) % self.num_data_ranks

    def pipeline_rank(self, rank: int) -> int:
        return rank // (self.world_size // self.pp)

    def owns_replicated(self, rank: int) -> bool:
        """Whether `rank` writes what all ranks of its pipeline stages have alike."""
        return rank % (self.world_size // self.pp) == 0

    def describe(self) -> str:
        """Short form for people: `fsdp4`, `pp2 x tp2`, `dp2 x fsdp2`; `fsdp1` for a single shard."""
        names = [
            ("pp", self.pp), ("dp", self.dp_replicate), ("fsdp", self.dp_shard),
            ("cp", self.cp), ("tp", self.tp), ("ep", self.ep),
        ]  # fmt: skip
        return " x ".join(f"{name}{degree}" for name, degree in names if degree > 1) or "fsdp1"


def fully_sharded(world_size: int) -> Layout:
    """The layout that shards everything over all ranks of `world_size`."""
    return Layout(dp_shard=world_size)
