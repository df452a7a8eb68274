"""NodeWatch: tells an executor which nodes have died and which ones Ray is about to take away. Decides nothing.

The death of one process is told by its failing call. That of a node is told by the head, after its health checks;
asking for it makes one loss of all the processes there, at once, instead of one after the other. A thread of its own,
so that a head that does not answer holds nobody up.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_service.cluster import gcs

_log = logging.getLogger(__name__)
_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """What the head says of the nodes."""

    dead: frozenset[str] = frozenset()
    draining: dict[str, float | None] = field(default_factory=dict)
    """By node id: the wall-clock time at which it goes away, if that is known."""
    raylets: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By node id, of those that live: address and port."""


class NodeWatch:
    """`told` is called on the watching thread, each time that the answer is another one."""

    def __init__(self, told: Callable[[NodesSeen], None]) -> None:
        self._told = told
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once; a question that is under way is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        seen = NodesSeen()
        answers = True
        while not self._stop.wait(_PERIOD_S):
            try:
                nodes = gcs.nodes()
                now_seen = NodesSeen(
                    dead=frozenset(node.node_id for node in nodes if not node.is_alive),
                    draining=gcs.draining(),
                    raylets={node.node_id: (node.ip, node.raylet_port) for node in nodes if node.is_alive},
                )
            except gcs.GcsUnavailable as error:
                if answers:
                    _log.warning("the Ray head is away; training goes on without it", extra={"error": str(error)})
                answers = False
                continue
            answers = True
            if now_seen != seen and not self._stop.is_set():
                seen = now_seen
                self._told(seen)
