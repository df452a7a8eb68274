"""Layout: how many ways each axis of the mesh splits the work. Pure data; the planner makes them, the engine obeys."""

from __future__ import annotations

from pydantic import Field

from shoal_workers.contract.base import Frozen


class Layout(Frozen):
    """Degrees of the parallel axes, outermost first. Their product is the world size."""

    dp_replicate: int = Field(1, ge=1)
    """Replicas of the (sharded) model: HSDP's outer axis."""
    dp_shard: int = Field(1, ge=1)
    """Ways that parameters, gradients and optimizer state are sharded (FSDP2)."""
    cp: int = Field(1, ge=1)
    """Context parallel: ways that one sequence is split."""
    tp: int = Field(1, ge=1)
    """Tensor parallel."""
    pp: int = Field(1, ge=1)
    """Pipeline stages."""
    ep: int = Field(1, ge=1)
    """Expert parallel; borrows ranks from the data axes, so it does not multiply into the world size."""

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    def describe(self) -> str:
        """Short form for people: `fsdp4`, `dp2 x fsdp2`; `fsdp1` for a single shard."""
        names = [
            ("dp", self.dp_replicate), ("fsdp", self.dp_shard), ("cp", self.cp),
            ("tp", self.tp), ("pp", self.pp), ("ep", self.ep),
        ]  # fmt: skip
        return " x ".join(f"{name}{degree}" for name, degree in names if degree > 1) or "fsdp1"


def fully_sharded(world_size: int) -> Layout:
    """The layout that shards everything over all ranks of `world_size`."""
    return Layout(dp_shard=world_size)
