"""Seconds of the collectives of each axis: which class of links its groups cross, and what moves over them.

Arrays have one entry per layout. The ranks are placed on nodes and in racks as `core/attempt/placement.py` does it: tp
groups are put next to each other in the order of BY_LOCALITY. The sizes of these nested blocks divide each other, and
racks and nodes are filled with whole blocks, the largest first. So a place with room for n tp groups has n // block
whole blocks, and no group of an axis crosses nodes if the nodes together have as many whole blocks as there are.

    pp2 x fsdp2 x tp2 on nodes of 4 workers    room for 2 tp groups on each node
    pp      block 2, 1 + 1 of 2 blocks         inside a node
    fsdp    block 4, 0 of 1 block              between nodes

This is the order of a first group. Later groups keep survivors on their ranks, so that cp, ep and pp may cross more.
`step_time` and `ranking` call `network`; a test compares it with the real order.

Collectives follow the ring model of NCCL's documentation: all-gather and reduce-scatter of B bytes over n ranks move
(n - 1) / n x B through every rank, and all-reduce twice that. A ring over several nodes has the bandwidth of the
network cards of all its ranks on one node together, and a ring over several racks that of the shares of the uplinks of
all its ranks in one rack. Its latency is that of the slowest class of links that it crosses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from shoal_service.core.hardware_profile import HardwareProfile, LinkClass, Racks
from shoal_service.planner.candidates import Candidates, Floats, Ints
from shoal_workers.contract.layout import BY_LOCALITY

LINK_CLASSES = tuple(LinkClass)


@dataclass(frozen=True)
class Spans:
    """The groups of each axis. `shards` has the ranks of dp_shard and cp, `experts` those of shards that have the same
    experts."""

    of_axis: Mapping[str, Span]
    """By axis, the busiest first; that of dp_shard is `shards`."""
    experts: Span

    @property
    def shards(self) -> Span:
        return self.of_axis["dp_shard"]

    def classes(self, row: int) -> dict[str, LinkClass]:
        """By axis of more than one rank, the busiest first: the slowest class of links that its groups cross."""
        return {axis: LINK_CLASSES[span.link[row]] for axis, span in self.of_axis.items() if span.size[row] > 1}


@dataclass(frozen=True)
class Network:
    """The links of a cluster, as the ranks of each layout use them."""

    profile: HardwareProfile
    spans: Spans
    sharing: Floats
    """Ranks that compete for one processor."""

    def group(self, span: Span) -> Group:
        return group(self.profile, span, self.sharing)


def network(
    columns: Candidates, profile: HardwareProfile, racks: Racks = (), locality: tuple[str, ...] = BY_LOCALITY
) -> Network:
    """The links of each layout.

    `racks`: where the workers are; (): in one rack, on as many nodes of the profile's size as they need.
    `locality`: the axes beside tp in the order in which their ranks are put next to each other.
    """
    worlds, index = np.unique(columns.world_size, return_inverse=True)
    sharing = np.array([profile.sharing(int(world)) for world in worlds])[index]
    return Network(profile, _spans(columns, profile, racks, locality), sharing)


def _spans(columns: Candidates, profile: HardwareProfile, racks: Racks, locality: tuple[str, ...]) -> Spans:
    """The blocks of `Layout.blocks`, as columns: each axis has the axes that communicate more inside its own blocks.

    Ranks of an ep that folds are neighbours."""
    places, inner = _Places(columns, profile, racks), np.ones_like(columns.tp)
    folds, spans = columns.folds_experts, {"tp": places.neighbours(columns.tp)}
    ep = np.where(folds, 1, columns.ep)
    for axis in locality:
        if axis == "dp_shard":
            outer = columns.dp_shard // ep
            shards, experts = (places.shards(run, inner, outer) for run in (columns.cp * ep, columns.cp))
            spans[axis], inner = shards, inner * outer
        else:
            degree = ep if axis == "ep" else getattr(columns, axis)
            spans[axis], inner = places.axis(inner, degree), inner * degree
    if folds.any():
        spans["ep"] = _choose(folds, places.neighbours(columns.ep), spans["ep"])
        block = np.where(folds, columns.ep // columns.tp, 1)
        experts = _choose(folds, places.axis(block, columns.shards // block), experts)
    return Spans(spans, experts)


def _choose(mask: np.ndarray, span: Span, otherwise: Span) -> Span:
    return Span(*(np.where(mask, getattr(span, f.name), getattr(otherwise, f.name)) for f in fields(Span)))


class _Places:
    """Nodes and racks, and the room in them."""

    def __init__(self, columns: Candidates, profile: HardwareProfile, racks: Racks) -> None:
        tp, world = columns.tp, columns.world_size
        self._tp = tp
        self._num_tp_groups = world // tp
        self._nodes: dict[int, Ints | int] = dict(Counter(size for rack in racks for size in rack))
        """Sizes of nodes, and the number of nodes of each size."""
        if not racks:
            self._nodes = {profile.ranks_per_node: -(-world // profile.ranks_per_node)}
        self._racks = Counter(tuple(sorted(rack)) for rack in racks)
        self._rooms = {size: size // tp for size in self._nodes}
        """Room in whole tp groups, by size of the node."""
        self._tp_crosses = self._whole_in_nodes(np.ones_like(tp)) < self._num_tp_groups
        self._rack_rooms = {
            rack: np.where(self._tp_crosses, sum(rack) // tp, sum(self._rooms[size] for size in rack))
            for rack in self._racks
        }

    def neighbours(self, degree: Ints) -> Span:
        """An axis of neighbouring ranks: tp, or whole tp groups side by side."""
        return Span(
            size=degree,
            link=self._link(np.maximum(1, degree // self._tp)),
            per_node=_least([_piece(np.full_like(degree, size), degree) for size in self._nodes], degree),
            per_rack=_least([_piece(np.full_like(degree, sum(rack)), degree) for rack in self._racks], degree),
        )

    def axis(self, inner: Ints, degree: Ints) -> Span:
        """An axis whose neighbours are `inner` tp groups apart."""
        return self.runs(np.ones_like(degree), inner, degree, inner * degree)

    def shards(self, run: Ints, inner: Ints, outer: Ints) -> Span:
        """The ranks of dp_shard, or those of them that have the same experts, whose runs are shorter by ep."""
        return self.runs(run, inner, outer, np.where(outer > 1, inner * outer, run))

    def runs(self, run: Ints, inner: Ints, outer: Ints, block: Ints) -> Span:
        """An axis that has `outer` runs of `run` tp groups side by side, the runs `inner` tp groups apart; all of them
        in one block."""
        size = run * outer

        def ranks_in(room: Ints) -> Ints:
            room = np.where(self._tp_crosses, np.maximum(room, 1), room)
            whole = _piece(room // inner, outer) * run
            num_ranks: Ints = np.where(room >= inner, whole, np.where(room > 0, np.minimum(room, run), size))
            return num_ranks

        return Span(
            size=size,
            link=self._link(block),
            per_node=_least([ranks_in(room) for room in self._rooms.values()], size),
            per_rack=_least([ranks_in(room) for room in self._rack_rooms.values()], size),
        )

    def _link(self, block: Ints) -> Ints:
        """The slowest class of links that a block of `block` tp groups crosses."""
        blocks, in_racks = self._num_tp_groups // block, np.zeros_like(block)
        for rack, room in self._rack_rooms.items():
            in_racks += self._racks[rack] * (room // block)
        crosses_racks = (in_racks < blocks) & (len(self._racks) > 0)
        classes = (LinkClass.INSIDE_NODE, LinkClass.BETWEEN_NODES, LinkClass.BETWEEN_RACKS)
        inside, nodes, racks = (LINK_CLASSES.index(link_class) for link_class in classes)
        return np.where(self._whole_in_nodes(block) >= blocks, inside, np.where(crosses_racks, racks, nodes))

    def _whole_in_nodes(self, block: Ints) -> Ints:
        """How many such blocks the nodes have room for."""
        num_whole = np.zeros_like(block)
        for size, number in self._nodes.items():
            num_whole += number * (self._rooms[size] // block)
        return num_whole


def _piece(room: Ints, size: Ints) -> Ints:
    """Ranks of the smallest piece of a group of `size` in a place with that room, which is filled with whole groups."""
    rest = room % size
    return np.where(room < size, room, np.where(rest > 0, rest, size))


def _least(of_places: list[Ints], otherwise: Ints) -> Ints:
    least: Ints = np.minimum.reduce(of_places) if of_places else otherwise
    return least


@dataclass(frozen=True, slots=True)
class Span:
    """Where the groups of an axis are."""

    size: Ints
    """Ranks of a group."""
    link: Ints
    """Index into LINK_CLASSES: the slowest class that any of the groups crosses."""
    per_node: Ints
    """Ranks of a group on one node; the least of all nodes."""
    per_rack: Ints


@dataclass(frozen=True, slots=True)
class Group:
    """The groups of one axis: where they are, ring bandwidth and latency."""

    span: Span
    bandwidth: Floats
    latency_s: Floats
    sharing: Floats | float
    profile: HardwareProfile

    @property
    def size(self) -> Ints:
        return self.span.size

    def gather_s(self, whole_bytes: Floats) -> Floats:
        """All-gather to, or reduce-scatter of, `whole_bytes`; 0 for a group of one."""
        moved = (self.size - 1) / self.size * whole_bytes
        return np.where(self.size > 1, moved / self.bandwidth + self.latency_s, 0.0)

    def reduce_s(self, whole_bytes: Floats) -> Floats:
        """All-reduce."""
        return 2 * self.gather_s(whole_bytes)

    def exchange_s(self, sent_bytes: Floats, crossing: Floats | float = 1.0) -> Floats:
        """All-to-all: each rank sends `sent_bytes`, an equal part to every rank. All classes of links work together.

        `crossing`: share of what goes to other nodes that crosses the network, if the rest is copied there."""
        size, profile = self.size, self.profile
        to_node = np.where(self.span.link >= 1, size - self.span.per_node, 0) / size
        to_rack = np.where(self.span.link >= 2, size - self.span.per_rack, 0) / size
        inside_share = 1 - 1 / size - np.where(np.less(crossing, 1), 0.0, to_node)
        shares = (inside_share, to_node * crossing, to_rack * crossing)
        inside, between, racks = (
            share * sent_bytes / profile.link(crossed).bandwidth * self.sharing
            for share, crossed in zip(shares, LINK_CLASSES, strict=True)
        )
        slowest = np.maximum(np.maximum(inside, between), racks)
        return np.where(size > 1, slowest + self.latency_s, 0.0)


def group(profile: HardwareProfile, span: Span, sharing: Floats | float = 1.0) -> Group:
    """The groups of an axis.

    `sharing`: ranks that compete for one processor (`HardwareProfile.sharing` of the world). All groups of an axis
    communicate at the same time, so sending takes this many times longer. Latencies were measured while the ranks of
    one group competed.
    """
    inside, between, racks = (profile.link(crossed).bandwidth for crossed in LINK_CLASSES)
    # each rank of a node may use its own cards, but not more than the links inside the node carry
    rails = np.minimum(inside, span.per_node * between)
    bandwidth = np.choose(span.link, [np.full_like(rails, inside), rails, np.minimum(rails, span.per_rack * racks)])
    latency_s = np.choose(span.link, [_by_size(span.size, profile.link(crossed).latency) for crossed in LINK_CLASSES])
    more = sharing / _by_size(span.size, profile.sharing)
    return Group(span, bandwidth / sharing, more * latency_s, sharing, profile)


def send_s(profile: HardwareProfile, num_bytes: Floats, link: Ints) -> Floats:
    """One message to the next rank of a group. `link`: the class of links that the group crosses."""
    links = [profile.link(crossed) for crossed in LINK_CLASSES]
    return np.choose(link, [num_bytes / used_link.bandwidth + used_link.latency(2) for used_link in links])


def _by_size(sizes: Ints, of: Callable[[int], float]) -> Floats:
    counts = np.bincount(sizes)  # sizes are small numbers, so a table is faster than sorting them
    return np.array([of(size) if count else 0.0 for size, count in enumerate(counts.tolist())])[sizes]
