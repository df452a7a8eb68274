"""Which worker gets which rank, so that the busiest axes do not leave a node. Pure; `choice` calls it.

tp communicates in every layer, cp and ep in every block, pp between stages, and the data axes once a step. So a first
group is filled node by node: as many whole blocks as fit of the largest size, then of the next smaller one.

    pp2 x fsdp2 x tp2              rank   0   1 | 2   3 | 4   5 | 6   7
    node A has workers 0 to 3    worker   0   1 | 4   5 | 2   3 | 6   7
    node B has workers 4 to 7      node     A   |   B   |   A   |   B      both stages of a pipeline are on one node

A later group keeps the usual order of `ranks` while that lets no more tp groups cross nodes than necessary. Otherwise
the tp groups are given to nodes again. A node keeps the groups of which it has the most survivors, and each of these
keeps its rank.

    fsdp2 x tp2     before 0 1 | 2 3     worker 1 is lost; spares 8 on node B, 9 on node A
    node A: 0 1     usual  0 8 | 2 3     the first tp group would cross nodes
    node B: 2 3     so     0 9 | 2 3

Whole groups go to nodes first. Groups for which no node has enough workers are formed inside a machine if possible,
which may run several nodes, and the rest across machines. The sizes divide each other, so this order of choices never
costs a whole group: no order of the candidates has fewer tp groups that cross nodes. Time: O(n log n) for n workers.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from shoal_workers.contract.layout import Layout


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may get a rank, and where it runs."""

    index: int
    node: str
    machine: str


def rank_order(candidates: Sequence[Candidate], previous: Sequence[int], layout: Layout) -> tuple[Candidate, ...]:
    """By rank, one candidate each.

    candidates: at least layout.world_size, in the usual order: the first of them without regard to nodes.
    previous: indexes of the last group's workers, in rank order.
    """
    usual = tuple(candidates[: layout.world_size])
    if layout.tp == layout.cp == layout.ep == 1:
        return usual
    former = {index: rank for rank, index in enumerate(previous)}
    survives = any(candidate.index in former for candidate in candidates)
    if survives and num_crossing([c.node for c in usual], layout.tp) == fewest_crossing(candidates, layout):
        return usual
    return _Allotment(candidates, {i: rank for i, rank in former.items() if rank < layout.world_size}, layout).order()


def num_crossing(nodes: Sequence[str], tp: int) -> int:
    """Number of tp groups that are on several nodes. `nodes`: by rank."""
    return sum(len(set(nodes[first : first + tp])) > 1 for first in range(0, len(nodes), tp))


def fewest_crossing(candidates: Sequence[Candidate], layout: Layout) -> int:
    """The least number of tp groups that any order of the candidates leaves on several nodes."""
    inside = sum(size // layout.tp for size in Counter(c.node for c in candidates).values())
    return max(0, layout.world_size // layout.tp - inside)


class _Allotment:
    """Gives all tp groups to places: first to nodes, then to machines, then to the whole cluster."""

    def __init__(self, candidates: Sequence[Candidate], former: dict[int, int], layout: Layout) -> None:
        self._layout = layout
        self._former = former
        """By worker index: its rank in the last group."""
        places = {(c.machine, c.node): None for c in candidates}
        machines = {machine: number for number, machine in enumerate(dict.fromkeys(m for m, _ in places))}
        order = {place: number for number, place in enumerate(sorted(places, key=lambda p: machines[p[0]]))}
        self._waiting = sorted(candidates, key=lambda c: order[c.machine, c.node])
        """Candidates without a rank: node by node, the nodes of a machine together, in the usual order in each."""
        self._ranks: list[Candidate | None] = [None] * layout.world_size
        self._groups = _by_locality(layout)
        """All tp groups; group g has the ranks from g * tp on."""
        self._open = self._groups
        """Those without workers."""

    def order(self) -> tuple[Candidate, ...]:
        whereabouts: tuple[Callable[[Candidate], str], ...] = (lambda c: c.node, lambda c: c.machine, lambda _: "")
        for place_of in whereabouts:
            if self._open:
                self._fill(place_of, self._homes(place_of))
        return tuple(candidate for candidate in self._ranks if candidate is not None)

    def _homes(self, place_of: Callable[[Candidate], str]) -> dict[int, str]:
        """By tp group: the place that has workers for all of it."""
        tp, is_open = self._layout.tp, set(self._open)
        room = {place: size // tp for place, size in Counter(place_of(c) for c in self._waiting).items()}
        homes: dict[int, str] = {}
        known = [c for c in self._waiting if c.index in self._former]
        survivors = Counter((self._former[c.index] // tp, place_of(c)) for c in known)
        for (group, place), _ in sorted(survivors.items(), key=lambda item: (-item[1], item[0][0])):
            if room[place] and group in is_open and group not in homes:
                homes[group] = place
                room[place] -= 1
        for size in _block_sizes(self._layout):
            whole = (self._groups[first : first + size] for first in range(0, len(self._groups), size))
            blocks = deque(block for block in whole if all(g in is_open and g not in homes for g in block))
            for place in room:
                while blocks and room[place] >= size:
                    homes.update(dict.fromkeys(blocks.popleft(), place))
                    room[place] -= size
        return homes

    def _fill(self, place_of: Callable[[Candidate], str], homes: dict[int, str]) -> None:
        """Workers of its place for each group that has one: survivors on their ranks, then the others in order."""
        tp = self._layout.tp
        others: dict[str, deque[Candidate]] = defaultdict(deque)
        for candidate in self._waiting:
            rank = self._former.get(candidate.index)
            if rank is not None and homes.get(rank // tp) == place_of(candidate):
                self._ranks[rank] = candidate
            else:
                others[place_of(candidate)].append(candidate)
        for group in self._open:
            for rank in range(group * tp, group * tp + tp):
                if group in homes and self._ranks[rank] is None:
                    self._ranks[rank] = others[homes[group]].popleft()
        self._waiting = [candidate for remaining in others.values() for candidate in remaining]
        self._open = [group for group in self._open if group not in homes]


def _block_sizes(layout: Layout) -> list[int]:
    """In tp groups, largest first: what had better be on one node as a whole."""
    sizes = [1]
    for degree in (layout.cp, layout.ep, layout.pp, layout.dp_shard // layout.ep, layout.dp_replicate):
        if degree > 1:
            sizes.append(sizes[-1] * degree)
    return sizes[::-1]


def _by_locality(layout: Layout) -> list[int]:
    """All tp groups, so that those that communicate most are next to each other: cp, ep, pp, dp_shard, dp_replicate."""
    axes = (layout.dp_replicate, layout.dp_shard // layout.ep, layout.pp, layout.ep, layout.cp)
    return [
        (((pp * layout.dp_replicate + replica) * layout.dp_shard) + outer * layout.ep + inner) * layout.cp + cp
        for replica, outer, pp, inner, cp in product(*(range(degree) for degree in axes))
    ]
