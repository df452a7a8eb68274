"""Capacity: how many nodes of how many workers are alive at each time of a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.scheduling.market import MarketNode, WorkerNeed

WORKER = WorkerNeed(cpus=1.0)
"""What each worker of a simulation reserves; a node of `workers_per_node` workers has that many CPUs."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Nodes over time. The nodes with the highest numbers leave first."""

    workers_per_node: int
    steps: tuple[tuple[float, int], ...]
    """(seconds since the start, nodes alive from then on): rising, the first at 0."""

    def __post_init__(self) -> None:
        assert self.workers_per_node >= 1 and self.steps and self.steps[0][0] == 0
        assert all(a[0] < b[0] for a, b in zip(self.steps, self.steps[1:], strict=False))

    @staticmethod
    def constant(nodes: int, workers_per_node: int) -> Capacity:
        return Capacity(workers_per_node, ((0.0, nodes),))

    def workers(self, step: int) -> int:
        """The number of workers that fit from the step of this index on."""
        return self.steps[step][1] * self.workers_per_node

    def nodes(self, step: int) -> tuple[MarketNode, ...]:
        return tuple(
            MarketNode(node_id=f"node-{number:05d}", cpus=float(self.workers_per_node))
            for number in range(self.steps[step][1])
        )

    def worker_seconds(self, start_s: float, end_s: float) -> float:
        """Integral of the workers over an interval."""
        ends = [at for at, _ in self.steps[1:]] + [end_s]
        return sum(
            max(0.0, min(end, end_s) - max(at, start_s)) * nodes * self.workers_per_node
            for (at, nodes), end in zip(self.steps, ends, strict=True)
        )
