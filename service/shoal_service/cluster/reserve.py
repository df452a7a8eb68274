"""SupervisorReserve: on which node one process waits for the next supervisor. Pure; the times are passed in.

A new process is started a while after the last supervisor was, so that it takes no time from that job's own start. It
is on another node each time, so that the supervisors of many jobs are not on one. Called by RayCluster.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

SETTLE_S = 5.0
_RENEWED_BEFORE_S = 20.0


class SupervisorReserve:
    """Empty until the first supervisor was started."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: a process that is not used ends after this time."""
        self._keep_s = keep_s
        self._environment = ""
        """The runtime environment of the last supervisor; the next one is expected to have the same."""
        self._node_id = ""
        self._reserved_for = ""
        """The environment of the process that waits."""
        self._last_node_id = ""
        self._ends_at = -math.inf
        self._renew_at = math.inf

    def take(self, environment: str, usable: Collection[str], now: float) -> str:
        """The node with the process, which is used up; empty: there is none for this supervisor."""
        self._renew_at = now + SETTLE_S
        fits = environment == self._reserved_for and self._node_id in usable and now < self._ends_at
        self._environment = environment
        if not fits:
            return ""
        node_id, self._node_id = self._node_id, ""
        return node_id

    def is_due(self, now: float) -> bool:
        """`renew` may have something to do."""
        return now >= self._renew_at

    def renew(self, nodes: Sequence[str], now: float) -> tuple[str, str] | None:
        """The node on which a process is to be started now, and its runtime environment; None: nothing to do.

        Args:
            nodes: in any order; the same ones each time, except those that have come or gone.
        """
        if not self.is_due(now) or not nodes:
            return None
        is_fit = self._reserved_for == self._environment
        if is_fit and self._node_id in nodes and now < self._ends_at - _RENEWED_BEFORE_S:
            self._renew_at = self._ends_at - _RENEWED_BEFORE_S
            return None
        following = sorted(nodes)
        self._node_id = next((node for node in following if node > self._last_node_id), following[0])
        self._last_node_id, self._ends_at = self._node_id, now + self._keep_s
        self._reserved_for = self._environment
        self._renew_at = self._ends_at - _RENEWED_BEFORE_S
        return self._node_id, self._environment
