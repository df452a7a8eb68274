"""Which ranks hold a shard that no other machine holds. Pure; called by `buddies`, `forming` and `node_loss`.

Ranks that differ only along dp_replicate hold the same shard, and each of them keeps it in its memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shoal_workers.contract.layout import Layout


def lonely_ranks(layout: Layout, machines: Sequence[str]) -> tuple[int, ...]:
    """`machines`: by rank. One rank for each shard whose replicas are all on one machine: the lowest."""
    holders: dict[int, list[int]] = defaultdict(list)
    for rank in range(len(machines)):
        holders[layout.shard_of(rank)].append(rank)
    return tuple(sorted(ranks[0] for ranks in holders.values() if len({machines[rank] for rank in ranks}) == 1))


def covered_ranks(layout: Layout, machines: Sequence[str]) -> frozenset[int]:
    """Ranks whose shard outlives their machine without a copy that they send themselves. None if there is one
    machine."""
    if len(set(machines)) <= 1:
        return frozenset()
    return frozenset(range(len(machines))) - frozenset(lonely_ranks(layout, machines))
