"""Which worker gets which rank, so that the busiest axes do not leave a node. Pure; `choice` calls it.

tp communicates in every layer, cp and ep in every block, pp between stages, and the data axes once a step. Links inside
a node are the fastest, those inside a rack faster than those between racks. So a first group is filled rack by rack,
and each rack node by node: as many whole blocks as fit of the largest size, then of the next smaller one.

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
which may run several nodes, then inside a rack, and the rest across racks. The sizes divide each other, so this order
of choices never costs a whole group: no order of the candidates has fewer tp groups that cross nodes. Time:
O(n log n) for n workers.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import product

from shoal_workers.contract.layout import Layout


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may get a rank, and where it runs."""

    index: int
    node: str
    machine: str
    rack: str = ""
    """Empty: unknown. All such candidates count as one rack."""
    slot: int = -1
    """Number of its GPU on the node; -1: it has none, or its number is not known."""


def rank_order(candidates: Sequence[Candidate], previous: Sequence[int], layout: Layout) -> tuple[Candidate, ...]:
    """By rank, one candidate each.

    candidates: at least layout.world_size, in the usual order: the first of them without regard to nodes.
    previous: indexes of the last group's workers, in rank order.
    """
    usual = tuple(candidates[: layout.world_size])
    if layout.world_size == layout.dp_shard and layout.ep == 1:
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
    """Gives all tp groups to places: first to nodes, then to machines, to racks and to the whole cluster."""

    def __init__(self, candidates: Sequence[Candidate], former: dict[int, int], layout: Layout) -> None:
        self._layout = layout
        self._former = former
        """By worker index: its rank in the last group."""
        self._waiting = _neighbours_together(candidates)
        """Candidates without a rank: node by node, in each by slot, then in the usual order."""
        self._ranks: list[Candidate | None] = [None] * layout.world_size
        self._groups = _by_locality(layout)
        """All tp groups; group g has the ranks from g * tp on."""
        self._position = {group: position for position, group in enumerate(self._groups)}
        self._open = self._groups
        """Those without workers."""

    def order(self) -> tuple[Candidate, ...]:
        for place_of in (_node, _machine, _rack, _cluster):
            if self._open:
                self._fill(place_of, self._homes(place_of))
        return tuple(candidate for candidate in self._ranks if candidate is not None)

    def _homes(self, place_of: PlaceOf) -> dict[int, str]:
        """By tp group: the place that has workers for all of it."""
        tp, is_open = self._layout.tp, set(self._open)
        room = {place: size // tp for place, size in Counter(place_of(c) for c in self._waiting).items()}
        homes = self._homes_of_survivors(place_of, is_open, room)
        racks = {place_of(c): "" if place_of is _cluster else c.rack for c in self._waiting}
        room_of_rack: dict[str, dict[str, int]] = {}
        for place, number in room.items():
            room_of_rack.setdefault(racks[place], {})[place] = number
        totals = {rack: sum(rooms.values()) for rack, rooms in room_of_rack.items()}
        groups_of: dict[str, set[int]] = {rack: set() for rack in totals}
        for group, rack in self._in_blocks(is_open - homes.keys(), totals).items():
            groups_of[rack].add(group)
        for rack, rooms in room_of_rack.items():
            homes |= self._in_blocks(groups_of[rack], rooms)
        return homes

    def _homes_of_survivors(self, place_of: PlaceOf, groups: Set[int], room: dict[str, int]) -> dict[int, str]:
        """Each of these tp groups where most of its survivors are. If several groups want one place, those first that
        would keep the fewest survivors elsewhere. `room` is used up."""
        found: dict[int, Counter[str]] = defaultdict(Counter)
        for candidate in self._waiting:
            rank = self._former.get(candidate.index)
            if rank is not None and rank // self._layout.tp in groups:
                found[rank // self._layout.tp][place_of(candidate)] += 1
        homes: dict[int, str] = {}

        def dispensable(group: int) -> tuple[int, int]:
            most = [number for _, number in found[group].most_common(2)]
            return sum(most[1:]) - most[0], group

        for group in sorted(found, key=dispensable):
            home = next((place for place, _ in found[group].most_common() if room[place]), None)
            if home is not None:
                homes[group] = home
                room[home] -= 1
        return homes

    def _in_blocks(self, groups: Set[int], room: dict[str, int]) -> dict[int, str]:
        """The place of each of these tp groups, or of as many as there is room for, in blocks as large as possible.
        `room`: by place, in tp groups; it is used up."""
        homes: dict[int, str] = {}
        remaining = sorted(self._position[group] for group in groups)
        for size in _block_sizes(self._layout):
            number_in = Counter(position // size for position in remaining)
            blocks = deque(block for block, number in number_in.items() if number == size)
            given = set()
            for place in room:
                while blocks and room[place] >= size:
                    given.add(block := blocks.popleft())
                    homes.update(dict.fromkeys(self._groups[block * size : (block + 1) * size], place))
                    room[place] -= size
            remaining = [position for position in remaining if position // size not in given]
        return homes

    def _fill(self, place_of: PlaceOf, homes: dict[int, str]) -> None:
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


PlaceOf = Callable[[Candidate], str]


def _node(candidate: Candidate) -> str:
    return candidate.node


def _machine(candidate: Candidate) -> str:
    return candidate.machine


def _rack(candidate: Candidate) -> str:
    return candidate.rack


def _cluster(_: Candidate) -> str:
    return ""


def _neighbours_together(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The nodes of a machine and the machines of a rack together, each kind of place in the usual order; on a node by
    slot, because GPUs with neighbouring numbers often have the shorter path to each other."""
    racks, machines, nodes = ({place_of(c): None for c in candidates} for place_of in (_rack, _machine, _node))
    places = [{name: number for number, name in enumerate(names)} for names in (racks, machines, nodes)]
    return sorted(candidates, key=lambda c: (places[0][c.rack], places[1][c.machine], places[2][c.node], c.slot))


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
