"""DrainTimes: measures how long nodes take to become empty after a drain begins, for the lead of maintenance windows.

Called by the control loop in each pass, with what the cluster reader has read. A drain that is undone, a node that
dies, and a node that had no worker count for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_service.core.nodes import Node


class DrainTimes:
    """Times are of the monotonic clock."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}

    def observe(self, nodes: Sequence[Node], workers: Mapping[str, Mapping[str, int]], mono: float) -> dict[str, float]:
        """Seconds of the drains that have ended since the last call, by node id.

        Args:
            workers: those that are alive, by job and node.
        """
        used = {node_id for on_nodes in workers.values() for node_id, count in on_nodes.items() if count}
        drained = {node.node_id for node in nodes if node.alive and node.drain is not None}
        ended = {id_: mono - began for id_, began in self._began.items() if id_ in drained and id_ not in used}
        self._began = {id_: self._began.get(id_, mono) for id_ in drained & used}
        return ended
