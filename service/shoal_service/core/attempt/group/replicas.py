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


def is_covered(layout: Layout, machines: Sequence[str], rank: int) -> bool:
    """This rank's shard outlives its machine without a copy that it sends itself. False if there is one machine."""
    return len(set(machines)) > 1 and rank not in lonely_ranks(layout, machines)
