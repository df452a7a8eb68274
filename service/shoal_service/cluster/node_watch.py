"""GcsNodeWatch: reports to an executor which nodes have died and which ones Ray drains. Decides nothing.

The death of one worker is found by its failing call. The death of a node is declared by the head, after its health
checks; with the node table all workers of that node are lost in one event instead of one after the other. The watch
runs on a thread of its own, so a head that does not answer delays nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shoal_service.cluster import gcs
from shoal_service.cluster.errors import GcsUnavailable
from shoal_service.cluster.node_table import NodeTable

_log = logging.getLogger(__name__)
_PERIOD_S = 0.5


class GcsNodeWatch:
    """Reads the head's node table every half second. The real `protocols.NodeWatch`."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def start(self, report: Callable[[NodeTable], None]) -> None:
        threading.Thread(target=self._run, args=(report,), name="node-watch", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch. Does not wait for a request that is under way."""
        self._stop.set()

    def dead_nodes(self) -> frozenset[str]:
        try:
            return _table().dead
        except GcsUnavailable:
            return frozenset()

    def _run(self, report: Callable[[NodeTable], None]) -> None:
        last = NodeTable()
        answers = True
        while not self._stop.wait(_PERIOD_S):
            try:
                table = _table()
            except GcsUnavailable as error:
                if answers:
                    _log.warning("ray_head.away", extra={"error": str(error)})
                answers = False
                continue
            answers = True
            if table != last and not self._stop.is_set():
                last = table
                report(table)


def _table() -> NodeTable:
    nodes = gcs.nodes()
    return NodeTable(
        dead=frozenset(node.node_id for node in nodes if not node.is_alive),
        draining=gcs.draining(),
        head=next((node.node_id for node in nodes if node.is_head and node.is_alive), ""),
        raylets={node.node_id: (node.ip, node.raylet_port) for node in nodes if node.is_alive},
    )
