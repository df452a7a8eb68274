"""Where workers fit: the free resources of each node during one decision, and which nodes a job may use.

Workers are indivisible, so capacity is counted node by node. A `Shape` is what jobs with equal workers share: what one
worker reserves and on which nodes it may be. Its nodes are ordered once; a cursor skips the nodes that are full, so
that thousands of workers are placed in a time that does not grow with the number of nodes.
Called by `decide`. It knows no job, no share and no priority.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from shoal_service.core.scheduling.market import CapacityKind, MarketJob, MarketNode, Placement, WorkerNeed

EPSILON = 1e-9
"""Ray counts resources in fixed point. A rounding error in a sum of floats must not cost a worker."""

UNLIMITED = 1_000_000
"""Room for workers that reserve nothing; more than any max_workers."""

LEAD_S = 30.0
"""A node that ends within this time gets no workers: a start there would hardly pay."""


class FreeNode:
    """What is free on a node."""

    __slots__ = ("cpus", "gpus", "memory_gib", "node")

    def __init__(self, node: MarketNode) -> None:
        self.node = node
        self.cpus = node.cpus
        self.gpus = node.gpus
        self.memory_gib = node.memory_gib

    def fits(self, need: WorkerNeed) -> int:
        """The number of such workers that fit."""
        room: float = UNLIMITED
        if need.cpus > 0:
            room = self.cpus / need.cpus
        if need.gpus > 0:
            room = min(room, self.gpus / need.gpus)
        if need.memory_gib > 0:
            room = min(room, self.memory_gib / need.memory_gib)
        return max(0, int(room + EPSILON))

    def reserve(self, need: WorkerNeed, workers: int) -> None:
        """Negative `workers` give back."""
        self.cpus -= workers * need.cpus
        self.gpus -= workers * need.gpus
        self.memory_gib -= workers * need.memory_gib


Sites: TypeAlias = list[tuple[FreeNode, int]]
"""Nodes, and the number of workers on each."""


class Shape:
    """Workers of one kind: what each reserves, and the nodes that they may use, in the order in which they fill."""

    def __init__(self, need: WorkerNeed, open_nodes: list[FreeNode], cordoned: list[FreeNode]) -> None:
        self.need = need
        self.words = need.describe()
        self.ever = sum(free.fits(need) for free in open_nodes)
        """Workers that fit into the empty cluster."""
        self._nodes = open_nodes
        self._cordoned = cordoned
        self._index = {id(free): at for at, free in enumerate(open_nodes)}
        self._cursor = 0
        self._at_most = UNLIMITED * (len(open_nodes) + 1)
        """No more than this fits; exact after an attempt that failed."""

    def take_all(self, workers: int) -> Sites | None:
        """Place all of these workers on open nodes, or none."""
        if workers > self._at_most:
            return None
        sites = self.take(workers)
        found = count(sites)
        if found == workers:
            return sites
        for free, here in sites:
            free.reserve(self.need, -here)
        self._at_most = found
        if sites:
            self._cursor = self._index[id(sites[0][0])]
        return None

    def take(self, most: int) -> Sites:
        """Place up to `most` workers on open nodes."""
        sites: Sites = []
        nodes, need = self._nodes, self.need
        while most > 0 and self._cursor < len(nodes):
            free = nodes[self._cursor]
            here = free.fits(need)
            if here > most:
                here = most
            if here > 0:
                free.reserve(need, here)
                sites.append((free, here))
                most -= here
                self._at_most -= here
            if most > 0:
                self._cursor += 1
        return sites

    def stay(self, most: int, on_nodes: Mapping[str, int]) -> Sites:
        """Place up to `most` workers that run already: on their nodes where known, cordoned or not, else on any."""
        sites: Sites = []
        if on_nodes:
            for free in (*self._cordoned, *self._nodes):
                here = min(most, on_nodes.get(free.node.node_id, 0), free.fits(self.need))
                most -= _reserve(free, self.need, here, sites)
            return sites + self.take(most) if most else sites
        sites = self.take(most)
        most -= count(sites)
        for free in self._cordoned if most else ():
            most -= _reserve(free, self.need, min(most, free.fits(self.need)), sites)
        return sites

    def free(self, most: int = UNLIMITED) -> int:
        """Workers that fit now on open nodes; counts no further than `most`."""
        found = 0
        for at in range(self._cursor, len(self._nodes)):
            found += self._nodes[at].fits(self.need)
            if found >= most:
                return most
        return found

    @property
    def is_full(self) -> bool:
        """No open node has room, as far as the last attempt to place a worker has shown."""
        return self._cursor >= len(self._nodes)

    def lacks(self, workers: int) -> bool:
        """It is known that so many workers do not fit now."""
        return workers > self._at_most

    def given_back(self, need: WorkerNeed, sites: Sites) -> None:
        """Workers of some shape have left these nodes."""
        if need == self.need:
            self._at_most += count(sites)
        else:
            self._at_most = UNLIMITED * (len(self._nodes) + 1)
        for free, _ in sites:
            self._cursor = min(self._cursor, self._index.get(id(free), self._cursor))

    def overlaps(self, other: Shape) -> bool:
        """Some node may be used by both."""
        return self is other or not self._index.keys().isdisjoint(other._index)


def _reserve(free: FreeNode, need: WorkerNeed, workers: int, sites: Sites) -> int:
    if workers <= 0:
        return 0
    free.reserve(need, workers)
    sites.append((free, workers))
    return workers


def count(sites: Sites) -> int:
    """Workers on these nodes."""
    return sum(workers for _, workers in sites)


class Room:
    """The nodes of one decision."""

    def __init__(self, nodes: Sequence[MarketNode], now: float) -> None:
        usable = [node for node in nodes if node.ends_at is None or node.ends_at > now + LEAD_S]
        self._nodes = [FreeNode(node) for node in sorted(usable, key=lambda node: node.node_id)]
        self._shapes: dict[object, Shape] = {}
        self._seen: dict[tuple[int, int, int, int], Shape] = {}
        """By identity, which is cheap to look up: the state holds these objects during the decision."""

    def shape(self, job: MarketJob) -> Shape:
        """The shape of a job's workers. All shapes must be known before the first worker is placed."""
        seen = (id(job.need), id(job.capacity), id(job.placement), id(job.selector) if job.selector else 0)
        shape = self._seen.get(seen)
        if shape is None:
            need = job.need
            key = (need.cpus, need.gpus, need.memory_gib, job.capacity, job.placement, frozenset(job.selector.items()))
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = self._new_shape(job)
            self._seen[seen] = shape
        return shape

    @property
    def num_shapes(self) -> int:
        return len(self._shapes)

    def give_back(self, need: WorkerNeed, sites: Sites) -> None:
        for free, workers in sites:
            free.reserve(need, -workers)
        for shape in self._shapes.values():
            shape.given_back(need, sites)

    def _new_shape(self, job: MarketJob) -> Shape:
        need, spread = job.need, job.placement is Placement.SPREAD

        def order(free: FreeNode) -> tuple[bool, bool, int]:
            """GPUs stay free for those that need them, on-demand nodes too; the fullest node first, or the emptiest."""
            fits = free.fits(need)
            return (not need.gpus and free.node.gpus > 0, not free.node.is_spot, -fits if spread else fits)

        allowed = sorted(_allowed(self._nodes, job), key=order)
        return Shape(
            need,
            [free for free in allowed if not free.node.is_cordoned],
            [free for free in allowed if free.node.is_cordoned],
        )


def _allowed(nodes: Iterable[FreeNode], job: MarketJob) -> Iterable[FreeNode]:
    """Nodes that the job's capacity kind and selector permit."""
    for free in nodes:
        node = free.node
        if job.capacity is not CapacityKind.ANY and node.is_spot != (job.capacity is CapacityKind.SPOT):
            continue
        if all(node.labels.get(name) == value for name, value in job.selector.items()):
            yield free
