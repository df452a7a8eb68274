"""Capacity: how many nodes of how many workers are alive at each time of a simulation, in one cluster or in several."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_service.core.scheduling.market import ClusterState, MarketNode, WorkerNeed

WORKER = WorkerNeed(cpus=1.0)
"""What each worker of a simulation reserves; a node of `workers_per_node` workers has that many CPUs."""


AWAY = -1
"""In place of a number of nodes: the whole cluster is lost. It does not answer, and its jobs stand still."""


@dataclass(frozen=True, slots=True)
class ClusterCapacity:
    """One of several clusters over time."""

    name: str
    steps: tuple[tuple[float, int], ...]
    """(seconds since the start, nodes alive from then on, or AWAY): rising."""

    def at(self, at_s: float) -> int:
        """Nodes, or AWAY; none before the first step."""
        step = bisect_right(self.steps, (at_s, math.inf)) - 1
        return self.steps[step][1] if step >= 0 else 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Nodes over time. The nodes with the highest numbers leave first."""

    workers_per_node: int
    steps: tuple[tuple[float, int], ...]
    """(seconds since the start, nodes alive from then on): rising, the first at 0. Of several clusters, their sum."""
    clusters: tuple[ClusterCapacity, ...] = ()
    """By name. Empty: there is one cluster, without a name."""

    def __post_init__(self) -> None:
        assert self.workers_per_node >= 1 and self.steps and self.steps[0][0] == 0
        assert all(a[0] < b[0] for a, b in zip(self.steps, self.steps[1:], strict=False))

    @staticmethod
    def constant(nodes: int, workers_per_node: int) -> Capacity:
        return Capacity(workers_per_node, ((0.0, nodes),))

    @staticmethod
    def of_clusters(clusters: Mapping[str, Sequence[tuple[float, int]]], workers_per_node: int) -> Capacity:
        """`clusters`: the steps of each one."""
        found = tuple(ClusterCapacity(name, tuple(clusters[name])) for name in sorted(clusters))
        times = sorted({0.0, *(at for one in found for at, _ in one.steps)})
        total = tuple((at, sum(max(0, one.at(at)) for one in found)) for at in times)
        return Capacity(workers_per_node, total, found)

    def workers_by_cluster(self, step: int) -> dict[str, int]:
        """The number of workers that fit into each cluster from the step of this index on; none where it is lost."""
        if not self.clusters:
            return {"": self.workers(step)}
        return {one.name: max(0, one.at(self.steps[step][0])) * self.workers_per_node for one in self.clusters}

    def states(self, step: int) -> dict[str, ClusterState]:
        """States of the clusters that have names."""
        return {
            one.name: ClusterState.AWAY if one.at(self.steps[step][0]) == AWAY else ClusterState.OPEN
            for one in self.clusters
        }

    def workers(self, step: int) -> int:
        """The number of workers that fit from the step of this index on."""
        return self.steps[step][1] * self.workers_per_node

    def nodes(self, step: int) -> tuple[MarketNode, ...]:
        at, total = self.steps[step]
        parts = [(f"{one.name}-", one.name, max(0, one.at(at))) for one in self.clusters] or [("", "", total)]
        return tuple(
            MarketNode(node_id=f"{prefix}node-{number:05d}", cpus=float(self.workers_per_node), cluster=name)
            for prefix, name, nodes in parts
            for number in range(nodes)
        )

    def worker_seconds(self, start_s: float, end_s: float) -> float:
        """Integral of the workers over an interval."""
        ends = [at for at, _ in self.steps[1:]] + [end_s]
        return sum(
            max(0.0, min(end, end_s) - max(at, start_s)) * nodes * self.workers_per_node
            for (at, nodes), end in zip(self.steps, ends, strict=True)
        )
