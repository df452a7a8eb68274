"""Workers on nodes, without an attempt: cases for the order of the ranks."""

from collections.abc import Sequence

from shoal_service.core.attempt.placement import Candidate
from shoal_workers.contract.layout import Layout


def usual_order(candidates: Sequence[Candidate], former: Sequence[int]) -> list[Candidate]:
    """Survivors in the order of their ranks, others in the places of lost workers, then at the end."""
    by_index = {c.index: c for c in candidates}
    others = [c for c in candidates if c.index not in former]
    usual = []
    for index in former:
        if index in by_index:
            usual.append(by_index[index])
        elif others:
            usual.append(others.pop(0))
    return [*usual, *others]


def layouts_of_16() -> list[Layout]:
    degrees = [1, 2, 4, 8, 16]
    return [
        Layout(pp=pp, dp_replicate=replicas, dp_shard=16 // (pp * replicas * cp * tp), cp=cp, tp=tp, ep=ep)
        for pp in degrees
        for replicas in degrees
        for cp in degrees
        for tp in degrees
        for ep in degrees
        if 16 % (pp * replicas * cp * tp) == 0 and 16 // (pp * replicas * cp * tp) % ep == 0
    ]


def layout_for(world_size: int, wanted: Layout) -> Layout:
    """For at most `world_size` workers: the same degrees with fewer shards, or without pp, cp, ep and replicas, or at
    last data ranks alone."""
    unit = wanted.pp * wanted.dp_replicate * wanted.cp * wanted.tp * wanted.ep
    if world_size >= unit:
        return wanted.model_copy(update={"dp_shard": world_size // unit * wanted.ep})
    if world_size >= wanted.tp:
        return Layout(dp_shard=world_size // wanted.tp, tp=wanted.tp)
    return Layout(dp_shard=world_size)


def most_that_keep_their_rank(candidates: Sequence[Candidate], former: Sequence[int], layout: Layout) -> int:
    """The largest number of survivors with the rank of the last group, over all orders in which no tp group crosses
    nodes. Tries every choice of nodes for the groups; there must be such a choice."""
    node_of = {c.index: c.node for c in candidates}
    nodes = sorted(set(node_of.values()))
    groups = [former[first : first + layout.tp] for first in range(0, layout.world_size, layout.tp)]
    room = tuple(sum(c.node == node for c in candidates) // layout.tp for node in nodes)
    best = {room: 0}
    for group in groups:
        found: dict[tuple[int, ...], int] = {}
        for left, kept in best.items():
            for number, node in enumerate(nodes):
                if left[number]:
                    after = (*left[:number], left[number] - 1, *left[number + 1 :])
                    here = sum(node_of.get(index) == node for index in group)
                    found[after] = max(found.get(after, 0), kept + here)
        best = found
    return max(best.values())
