"""NodePreference: on which node Ray should start each new worker, from what is free in the cluster now.

Reads the head's tables and remembers what it has chosen since; `core/attempt/group/placement/node_choice.py` decides.
Made and called by `RayFleet`, on the threads that create actors.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal_service.cluster import gcs
from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.core.attempt.commands import StartWorker
from shoal_service.core.attempt.node_choice import NodeRoom, choose_node
from shoal_workers.contract.placing import Placement

_READ_S = 1.0
"""For so long a table is used; nodes report a change after about 0.1 s."""
_NOT_IN = "!in("
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class FreeNode:
    """A live node."""

    node_id: str
    labels: Mapping[str, str] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)
    """Resources that nothing reserves, by Ray's names."""


class NodePreference:
    """Thread-safe."""

    def __init__(
        self,
        needs: Mapping[str, float],
        placement: Placement,
        *,
        read: Callable[[], Sequence[FreeNode]] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            needs: what one worker reserves, by Ray's names of resources. Without any, all nodes have room for all
                workers, and Ray chooses.
            read: the live nodes; raises GcsUnavailable. Default: from the head of the cluster.
        """
        self._needs = {name: amount for name, amount in needs.items() if amount}
        self._placement = placement
        self._read = read or _live_nodes
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._node_of: dict[int, str] = {}
        """By worker index: where it is, or ought to be."""
        self._held: Counter[str] = Counter()
        self._nodes: Sequence[FreeNode] = ()
        self._read_mono = float("-inf")
        self._taken: Counter[str] = Counter()
        """Workers for which a node was chosen since the table was read."""

    def choose(self, order: StartWorker, labels: Mapping[str, str]) -> str:
        """The id of the node; empty: Ray chooses, also if the head does not answer within some seconds.

        Args:
            labels: of the nodes on which the worker may be, as Ray's `label_selector`.
        """
        if not self._needs:
            return ""
        with self._lock:
            nodes = self._rooms(order, labels)
            chosen = choose_node(nodes, num_missing=order.num_missing, tp=order.tp, placement=self._placement)
            if chosen:
                self._taken[chosen] += 1
                self._move(order.index, chosen)
            return chosen

    def is_on(self, index: int, node_id: str) -> None:
        """The worker runs there, wherever it ought to be."""
        with self._lock:
            self._move(index, node_id)

    def forget(self, index: int) -> None:
        """The worker has ended."""
        with self._lock:
            self._move(index, "")

    def _move(self, index: int, node_id: str) -> None:
        before = self._node_of.pop(index, "")
        if before:
            self._held[before] -= 1
        if node_id:
            self._node_of[index] = node_id
            self._held[node_id] += 1

    def _rooms(self, order: StartWorker, labels: Mapping[str, str]) -> list[NodeRoom]:
        if self._monotonic() - self._read_mono > _READ_S:
            try:
                self._nodes = self._read()
            except GcsUnavailable:
                self._nodes = ()
            self._read_mono = self._monotonic()
            self._taken.clear()
        return [
            NodeRoom(node.node_id, room, self._held[node.node_id])
            for node in self._nodes
            if (room := self._room(node)) > 0 and node.node_id not in order.avoid_nodes and _has(node.labels, labels)
        ]

    def _room(self, node: FreeNode) -> int:
        fits = min(int(node.free.get(name, 0.0) / amount + _EPSILON) for name, amount in self._needs.items())
        return fits - self._taken[node.node_id]


def _live_nodes() -> list[FreeNode]:
    free = gcs.available()
    return [FreeNode(node.node_id, node.labels, free.get(node.node_id, {})) for node in gcs.nodes() if node.is_alive]


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Of Ray's expressions those that Shoal uses: a value, and `!in(a,b)`."""
    for name, value in wanted.items():
        if value.startswith(_NOT_IN):
            if labels.get(name) in value.removeprefix(_NOT_IN).removesuffix(")").split(","):
                return False
        elif labels.get(name) != value:
            return False
    return True
