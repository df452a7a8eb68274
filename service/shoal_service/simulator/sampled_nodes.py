"""The nodes of a twin's sample: which workers are on them, which of them can be used, and which one a failure hits."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from shoal_service.simulator.failures import Failure
from shoal_workers.contract import Assignment

PER_NODE = 2
"""Workers of a node in the sample: one may die while another serves the node's memory."""


@dataclass(slots=True)
class Node:
    node_id: str
    rack: str = ""
    workers: set[int] = field(default_factory=set)
    is_down: bool = False
    """Nothing on it answers any longer."""
    is_broken: bool = False
    """It has to be repaired, so it passes no test. A node that is down is broken."""
    is_avoided: bool = False
    slowdown: float = 1.0
    """How many times as long the worker in slot 0 computes."""

    @property
    def is_missing(self) -> bool:
        return self.is_broken or self.is_avoided

    def renew(self) -> None:
        """It has been repaired, and is a new node."""
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
        """True if it takes part in nothing any longer."""
        return self.is_stuck or self.node is None or self.node.is_down


class SampledNodes:
    """`workers`: those that exist or wait for a node, by index. A rack has `rack_size` nodes."""

    def __init__(self, number: int, rack_size: int) -> None:
        self.nodes = [Node(f"n{index}", f"r{index // rack_size}") for index in range(number)]
        self.workers: dict[int, SampledWorker] = {}

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

    def place(self) -> list[SampledWorker]:
        """Give nodes to the workers that wait for one, as far as there is room. Return these workers."""
        waiting = [worker for worker in self.workers.values() if worker.node is None]
        free = [node for node in self.nodes if not node.is_missing and len(node.workers) < PER_NODE] if waiting else []
        placed = []
        for worker in waiting if free else ():
            fitting = [
                node
                for node in free
                if len(node.workers) < PER_NODE
                and node.node_id not in worker.avoids
                and worker.only_on in ("", node.node_id)
            ]
            if fitting:
                node = worker.node = max(fitting, key=lambda node: len(node.workers))
                worker.slot = int(any(self.workers[index].slot == 0 for index in node.workers))
                node.workers.add(worker.index)
                placed.append(worker)
        return placed

    def trains(self, node: Node, group: Container[int]) -> bool:
        """True if a worker of the node is in `run`. `group`: indexes of the group's workers."""
        return any(self.workers[index].run is not None and index in group for index in node.workers)

    def choose(self, failure: Failure, group: Container[int], *, num_training: int, total: int) -> list[Node]:
        """Return the nodes that the failure hits, all in one rack; none if it hits one that is missing already.

        `num_training` of `total` nodes of the job train, and the nodes of the group stand for them.
        """
        usable = [node for node in self.nodes if not node.is_missing]
        training = [node for node in usable if self.trains(node, group)]
        rest = [node for node in usable if not self.trains(node, group)]
        share = num_training / total if training else 0.0
        if failure.draw < share:
            first = training[int(failure.draw / share * len(training))]
            mates = [node for node in usable if node.rack == first.rack and node is not first]
            return [first, *mates[: failure.cause.nodes - 1]]
        if failure.draw >= 1 - self.num_missing / total or not rest:
            return []
        return [rest[int((failure.draw - share) / (1 - share) * len(rest))]]

    def find_buddies(self, node: Node) -> Sequence[Node]:
        """Return the nodes with copies of this node's snapshots."""
        runs = [run for index in node.workers if (run := self.workers[index].run) is not None]
        names = {run.buddy.node_id for run in runs if run.buddy is not None}
        return [other for other in self.nodes if other.node_id in names]
