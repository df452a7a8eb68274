"""plan(spec, world size) -> (layout, reason): how the axes split the work for what is left. Pure.

This version has one answer, fully sharded data parallel; the signature is the one that the ranked planner keeps.
"""

from __future__ import annotations

from shoal_workers.contract.layout import Layout, fully_sharded
from shoal_workers.contract.spec import JobSpec


def plan(spec: JobSpec, world_size: int) -> tuple[Layout, str]:
    """The layout for `world_size` shards, and why."""
    micro_batches = spec.batch.num_micro_batches
    longest = -(-micro_batches // world_size)
    filler = longest * world_size - micro_batches
    reason = f"{micro_batches} micro-batches over {world_size} ranks: {longest} each"
    return fully_sharded(world_size), reason + (f", {filler} of them zero-weight filler" if filler else "")
