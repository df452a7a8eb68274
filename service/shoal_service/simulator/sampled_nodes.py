"""Place the workers of a twin's sample on its nodes, and choose the nodes that a failure hits.

The sample has some of the nodes that train and the idle ones; they stand for all nodes of the job (see `twin`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from shoal_service.simulator.failures import Failure
from shoal_workers.contract import Assignment

WORKERS_PER_NODE = 2
"""Workers of each node in the sample: one may die while another serves the node's memory."""


@dataclass(slots=True)
class Node:
    node_id: str
    rack: str = ""
    workers: set[int] = field(default_factory=set)
    is_down: bool = False
    """Nothing on the node answers."""
    is_broken: bool = False
    """The node passes no test until it is repaired. A node that is down is also broken."""
    is_avoided: bool = False
    slowdown: float = 1.0
    """Factor on the compute time of the worker in slot 0."""

    @property
    def is_missing(self) -> bool:
        return self.is_broken or self.is_avoided

    def mark_repaired(self) -> None:
        """Make it a new node, with another id, that can be used again."""
        self.node_id += "'"
        self.is_down = self.is_broken = self.is_avoided = False
        self.slowdown = 1.0


@dataclass(slots=True)
class SampledWorker:
    index: int
    worker_id: str
    avoids: tuple[str, ...]
    only_on: str
    node: Node | None = None
    slot: int = 0
    is_warm: bool = False
    is_stuck: bool = False
    run: Assignment | None = None

    @property
    def slowdown(self) -> float:
        return self.node.slowdown if self.node is not None and self.slot == 0 else 1.0

    @property
    def is_lost(self) -> bool:
        """True if the worker takes part in no group any more."""
        return self.is_stuck or self.node is None or self.node.is_down


class SampledNodes:
    """Nodes in racks of `rack_size`, and the workers that are on them or wait for one."""

    def __init__(self, num_nodes: int, rack_size: int) -> None:
        self.nodes = [Node(f"n{index}", f"r{index // rack_size}") for index in range(num_nodes)]
        self.workers: dict[int, SampledWorker] = {}
        """Workers by index."""

    @property
    def num_missing(self) -> int:
        return sum(node.is_missing for node in self.nodes)

    def find_node(self, node_id: str) -> Node | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def clear(self) -> None:
        self.workers.clear()
        for node in self.nodes:
            node.workers.clear()

    def remove(self, index: int) -> None:
        worker = self.workers.pop(index, None)
        if worker is not None and worker.node is not None:
            worker.node.workers.discard(index)

    def place_waiting(self) -> list[SampledWorker]:
        """Place the workers that wait for a node, as far as there is room; return the placed workers."""
        waiting = [worker for worker in self.workers.values() if worker.node is None]
        free = (
            [node for node in self.nodes if not node.is_missing and len(node.workers) < WORKERS_PER_NODE]
            if waiting
            else []
        )
        placed = []
        for worker in waiting if free else ():
            fitting = [
                node
                for node in free
                if len(node.workers) < WORKERS_PER_NODE
                and node.node_id not in worker.avoids
                and worker.only_on in ("", node.node_id)
            ]
            if fitting:
                node = worker.node = max(fitting, key=lambda node: len(node.workers))
                worker.slot = int(any(self.workers[index].slot == 0 for index in node.workers))
                node.workers.add(worker.index)
                placed.append(worker)
        return placed

    def is_training(self, node: Node, group: Container[int]) -> bool:
        """Return True if a worker of the node trains. `group`: indexes of the group's workers."""
        return any(self.workers[index].run is not None and index in group for index in node.workers)

    def choose_hit_nodes(self, failure: Failure, group: Container[int], *, num_training: int, total: int) -> list[Node]:
        """Return the nodes that the failure hits, all in one rack; none if its node is missing already.

        Args:
            group: indexes of the group's workers.
            num_training: nodes of the whole job that train; the sample's nodes that train stand for them.
            total: nodes of the whole job.
        """
        usable = [node for node in self.nodes if not node.is_missing]
        training = [node for node in usable if self.is_training(node, group)]
        idle = [node for node in usable if not self.is_training(node, group)]
        share = num_training / total if training else 0.0
        if failure.draw < share:
            first = training[int(failure.draw / share * len(training))]
            neighbours = [node for node in usable if node.rack == first.rack and node is not first]
            return [first, *neighbours[: failure.cause.nodes - 1]]
        if failure.draw >= 1 - self.num_missing / total or not idle:
            return []
        return [idle[int((failure.draw - share) / (1 - share) * len(idle))]]

    def find_buddies(self, node: Node) -> Sequence[Node]:
        """Return the nodes with copies of this node's snapshots."""
        runs = [run for index in node.workers if (run := self.workers[index].run) is not None]
        buddy_ids = {run.buddy.node_id for run in runs if run.buddy is not None}
        return [other for other in self.nodes if other.node_id in buddy_ids]
