"""Where workers fit: the free resources of each node during one decision, and which nodes a job may use.

Workers are indivisible, so capacity is counted node by node. A `Shape` is what jobs with equal workers share: what one
worker reserves and on which nodes it may be. These are of one cluster, since a job does not span clusters; a queued job
that may start in any of several has a shape in each. A shape's nodes are ordered once; a cursor skips the nodes that
are full, so that thousands of workers are placed in a time that does not grow with the number of nodes.
Called by `decide`. It knows no job, no share and no priority.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from shoal_service.core.scheduling.market import MarketJob, MarketNode, ShapeKey, WorkerNeed
from shoal_workers.contract import CapacityKind, Placement

EPSILON = 1e-9
"""Tolerance in comparisons of resources. Ray counts them in fixed point, and a rounding error in a sum of floats must
not cost a worker."""

UNLIMITED = 1_000_000
"""Number that stands for unlimited room, as for workers that reserve nothing; more than any max_workers."""


class FreeNode:
    """What is free on a node."""

    __slots__ = ("cpus", "gpus", "memory_gib", "node")

    def __init__(self, node: MarketNode) -> None:
        self.node = node
        self.cpus = node.cpus
        self.gpus = node.gpus
        self.memory_gib = node.memory_gib

    def copy(self) -> FreeNode:
        """The same node with the same free resources."""
        copied = FreeNode(self.node)
        copied.cpus, copied.gpus, copied.memory_gib = self.cpus, self.gpus, self.memory_gib
        return copied

    def fits(self, need: WorkerNeed) -> int:
        """The number of such workers that fit."""
        room: float = UNLIMITED
        if need.cpus > 0:
            room = self.cpus / need.cpus
        if need.gpus > 0 and (gpus := self.gpus / need.gpus) < room:
            room = gpus
        if need.memory_gib > 0 and (memory := self.memory_gib / need.memory_gib) < room:
            room = memory
        return int(room + EPSILON) if room > 0 else 0

    def reserve(self, need: WorkerNeed, workers: int) -> None:
        """Reserve what `workers` workers need; a negative number gives it back."""
        self.cpus -= workers * need.cpus
        self.gpus -= workers * need.gpus
        self.memory_gib -= workers * need.memory_gib


Sites: TypeAlias = list[tuple[FreeNode, int]]
"""Nodes, and the number of workers on each."""


class Shape:
    """Workers of one kind in one cluster: what each reserves, and the nodes that they may use, in the order in which
    they fill."""

    def __init__(self, need: WorkerNeed, open_nodes: list[FreeNode], cordoned: list[FreeNode], cluster: str) -> None:
        self.need = need
        self.cluster = cluster
        self.need_text = need.describe()
        self.ever = sum(free.fits(need) for free in open_nodes)
        """Number of workers that fit into the empty nodes."""
        self.nodes = open_nodes
        self._cordoned = cordoned
        self._index = {free: at for at, free in enumerate(open_nodes)}
        self._by_id: dict[str, tuple[int, FreeNode]] = {}
        """Node, and its place in the order in which workers stay, by node id: cordoned nodes first."""
        self._overlaps: dict[int, bool] = {}
        self._per_worker: dict[int, tuple[float, float]] = {}
        self._roomy = list(range(len(open_nodes)))
        """Indexes in `nodes` of the nodes that may have room, rising. A node that is found full leaves it, and returns
        when a worker leaves the node."""
        self._at_most = UNLIMITED * (len(open_nodes) + 1)
        """Upper bound of the workers that fit now."""

    def take_all(self, workers: int) -> Sites | None:
        """Place all of these workers on open nodes, or none."""
        if workers > self._at_most:
            return None
        return self._take_on_first(workers) or (self.take(workers) if self.free(workers) >= workers else None)

    def _take_on_first(self, workers: int) -> Sites | None:
        """Place them all on the first node that may have room, or none."""
        if not self._roomy:
            return None
        free = self.nodes[self._roomy[0]]
        if workers <= 0 or free.fits(self.need) < workers:
            return None
        free.reserve(self.need, workers)
        self._at_most -= workers
        return [(free, workers)]

    def take(self, most: int) -> Sites:
        """Place up to `most` workers on open nodes."""
        nodes, need, roomy = self.nodes, self.need, self._roomy
        sites = self._take_on_first(most)
        if sites is not None:
            return sites
        sites = []
        while most > 0 and roomy:
            free = nodes[roomy[0]]
            here = free.fits(need)
            if here > most:
                here = most
            if here > 0:
                free.reserve(need, here)
                sites.append((free, here))
                most -= here
                self._at_most -= here
            if most > 0:
                del roomy[0]
        return sites

    def take_beside(self, most: int, limit: Callable[[FreeNode], int]) -> Sites:
        """Place up to `most` workers on open nodes, and no more on a node than its limit."""
        sites: Sites = []
        for at in self._roomy:
            if most <= 0:
                break
            free = self.nodes[at]
            here = min(most, free.fits(self.need))
            if here > 0:
                here = min(here, limit(free))
            most -= _reserve(free, self.need, here, sites)
        self._at_most -= count(sites)
        return sites

    def may_use(self, free: FreeNode) -> bool:
        """Return whether this is an open node of the shape."""
        return free in self._index

    def stay(self, most: int, on_nodes: Mapping[str, int]) -> Sites:
        """Place up to `most` workers that run already: on their nodes where those are known, cordoned or not, otherwise
        on any."""
        sites: Sites = []
        if on_nodes:
            for free in self._known(on_nodes):
                here = min(most, on_nodes[free.node.node_id], free.fits(self.need))
                most -= _reserve(free, self.need, here, sites)
            return sites + self.take(most) if most else sites
        sites = self.take(most)
        if self._cordoned:
            most -= count(sites)
            for free in self._cordoned if most else ():
                most -= _reserve(free, self.need, min(most, free.fits(self.need)), sites)
        return sites

    def _known(self, on_nodes: Mapping[str, int]) -> list[FreeNode]:
        """The nodes among these that the shape may use, in its order."""
        if not self._by_id:
            ordered = (*self._cordoned, *self.nodes)
            self._by_id = {free.node.node_id: (at, free) for at, free in enumerate(ordered)}
        if len(on_nodes) == 1:
            return [self._by_id[name][1] for name in on_nodes if name in self._by_id]
        return [free for _, free in sorted(self._by_id[name] for name in on_nodes if name in self._by_id)]

    def free(self, most: int = UNLIMITED) -> int:
        """Number of workers that fit now on open nodes. It counts no further than `most`."""
        if most > self._at_most:
            most = self._at_most
        nodes, need = self.nodes, self.need
        num_free = 0
        roomy = []
        for at in self._roomy:
            here = nodes[at].fits(need)
            num_free += here
            if num_free >= most:
                return most
            if here:
                roomy.append(at)
        self._roomy = roomy
        self._at_most = num_free
        return num_free

    @property
    def num_nodes(self) -> int:
        """Number of nodes on which its workers may be."""
        return len(self.nodes) + len(self._cordoned)

    @property
    def is_full(self) -> bool:
        """True if no open node has room, as far as the last attempt to place a worker has shown."""
        return not self._roomy

    def lacks(self, workers: int) -> bool:
        """Return whether `workers` workers do not fit now."""
        if workers > self._at_most:
            return True
        if self._roomy and self.nodes[self._roomy[0]].fits(self.need) >= workers:
            return False
        return self.free(workers) < workers

    def note_freed(self, other: Shape, sites: Sites) -> None:
        """Note that workers of another shape have left these nodes."""
        _, most = self.per_worker(other)
        for free, workers in sites:
            at = self._index.get(free)
            if at is not None:
                self._at_most += workers if most == 1.0 else math.ceil(workers * most - EPSILON)
                place = bisect_left(self._roomy, at)
                if self._roomy[place : place + 1] != [at]:
                    self._roomy.insert(place, at)

    def per_worker(self, other: Shape) -> tuple[float, float]:
        """How many of this shape's workers fit in the place of one of the other's: on an empty node, and at most, with
        what is free beside it."""
        bounds = self._per_worker.get(id(other))
        if bounds is None:
            need = other.need
            pairs = (
                (need.cpus, self.need.cpus),
                (need.gpus, self.need.gpus),
                (need.memory_gib, self.need.memory_gib),
            )
            ratios = [have / want for have, want in pairs if want > 0]
            bounds = self._per_worker[id(other)] = (min(ratios, default=1.0), max(ratios, default=1.0))
        return bounds

    def overlaps(self, other: Shape) -> bool:
        """Return whether some node may be used by both shapes."""
        if self is other:
            return True
        are_shared = self._overlaps.get(id(other))
        if are_shared is None:
            are_shared = self._overlaps[id(other)] = not self._index.keys().isdisjoint(other._index)
        return are_shared


def _reserve(free: FreeNode, need: WorkerNeed, workers: int, sites: Sites) -> int:
    if workers <= 0:
        return 0
    free.reserve(need, workers)
    sites.append((free, workers))
    return workers


def count(sites: Sites) -> int:
    """Number of workers on these nodes."""
    return sites[0][1] if len(sites) == 1 else sum([workers for _, workers in sites])


class Room:
    """The nodes of one decision."""

    def __init__(self, nodes: Sequence[MarketNode]) -> None:
        self._nodes = [FreeNode(node) for node in sorted(nodes, key=lambda node: node.node_id)]
        self.clusters: tuple[str, ...] = tuple(sorted({node.cluster for node in nodes}))
        """Names of the clusters that have nodes, sorted."""
        self._shapes: dict[tuple[str | None, ShapeKey], Shape] = {}
        """Shapes by cluster and key. The cluster is None for a job that runs in one of several, when it is not known in
        which."""
        self.num_returns = 0
        """Number that grows whenever workers leave their nodes."""

    def shape(self, job: MarketJob) -> Shape:
        """The shape of a job's workers in the cluster where it runs; for a queued job, the first one that it may
        have."""
        return self.choices(job)[0]

    def choices(self, job: MarketJob) -> tuple[Shape, ...]:
        """The shape of a job's workers in each cluster in which it may be, by name of the cluster. There is at least
        one, which may have no nodes. All shapes must be known before the first worker is placed."""
        if job.cluster:
            names: Sequence[str | None] = [job.cluster]
        elif job.granted and len(self.clusters) > 1:
            names = [None]
        else:
            names = self.clusters or [""]
        if job.excluded_clusters and not job.granted:
            names = [name for name in names if name not in job.excluded_clusters]
        return tuple([self._shape(name, job) for name in names]) or (Shape(job.need, [], [], ""),)

    def _shape(self, cluster: str | None, job: MarketJob) -> Shape:
        key = cluster, job.shape_key
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._new_shape(job, cluster)
        return shape

    @property
    def shapes(self) -> Iterable[Shape]:
        return self._shapes.values()

    def give_back(self, other: Shape, sites: Sites) -> None:
        self.num_returns += 1
        for free, workers in sites:
            free.reserve(other.need, -workers)
        if sites:
            for shape in self._shapes.values():
                shape.note_freed(other, sites)

    def _new_shape(self, job: MarketJob, cluster: str | None) -> Shape:
        need, spread = job.need, job.placement is Placement.SPREAD

        def order(free: FreeNode) -> tuple[bool, bool, int]:
            """Sort key of a node; the least is filled first. GPUs stay free for those that need them, on-demand nodes
            too; then the fullest node first, or the emptiest."""
            node, fits = free.node, free.fits(need)
            is_gpu_wasted = not need.gpus and node.gpus > 0
            return (is_gpu_wasted, not node.is_spot, -fits if spread else fits)

        of_cluster = [free for free in self._nodes if cluster is None or free.node.cluster == cluster]
        allowed = sorted(_allowed(of_cluster, job), key=order)
        return Shape(
            need,
            [free for free in allowed if not free.node.is_cordoned],
            [free for free in allowed if free.node.is_cordoned],
            cluster or "",
        )


def _allowed(nodes: Iterable[FreeNode], job: MarketJob) -> Iterable[FreeNode]:
    """Nodes that the job's capacity kind and selector permit."""
    for free in nodes:
        node = free.node
        if job.capacity is not CapacityKind.ANY and node.is_spot != (job.capacity is CapacityKind.SPOT):
            continue
        if all(node.labels.get(name) == value for name, value in job.selector.items()):
            yield free
