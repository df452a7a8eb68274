"""Processes that Ray starts before there is an actor for them: which nodes have one, and the request to a raylet.

A raylet keeps such a process idle until an actor with the same runtime environment comes, which then need not wait for
a process. Each of them becomes the process of one actor. If no actor comes, the process ends itself
(`shoal_workers/forkserver/idle.py`). Nothing depends on it: if a request is lost, Ray starts the process with the
actor. Called by `gateway/ray_cluster.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

import ray
from shoal_service.cluster.gcs import RayNode
from shoal_workers.ray_internals import request_idle_processes

_log = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_SETUP_TIMEOUT_S = 600
"""Ray's own limit for the setup of a runtime environment."""
SETTLE_S = 5.0
_RENEWED_BEFORE_S = 20.0


def prestart(node: RayNode, environment: str, *, number: int, keep_s: float, working_dir: str | None = None) -> None:
    """Request idle processes from the node's raylet; does not wait for them, and raises nothing.

    Args:
        environment: the serialized runtime environment, exactly as Ray writes it for the actor.
        keep_s: how long the raylet keeps a process that it does not use.
        working_dir: the URI of the code package in `environment`.
    """
    request_idle_processes(
        f"{node.ip}:{node.raylet_port}",
        environment,
        job_id=ray.get_runtime_context().get_job_id(),
        number=number,
        keep_s=keep_s,
        working_dir=working_dir or "",
        setup_s=_SETUP_TIMEOUT_S,
        timeout_s=_TIMEOUT_S,
        failed=lambda error: _log.info("prestart.failed", extra={"node": node.node_id, "error": str(error)}),
    )


class SupervisorReserve:
    """Decides on which node one process waits for the next supervisor. Pure; the times are passed in.

    A new process is started a while after the last supervisor was, so that it takes no time from that job's own start.
    It is on another node each time, so that the supervisors of many jobs are not on one. No process waits until the
    first supervisor was started.
    """

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
        """Uses up the process that waits, and returns its node; empty: no process fits this supervisor."""
        self._renew_at = now + SETTLE_S
        fits = environment == self._reserved_for and self._node_id in usable and now < self._ends_at
        self._environment = environment
        if not fits:
            return ""
        node_id, self._node_id = self._node_id, ""
        return node_id

    def is_due(self, now: float) -> bool:
        """Return whether `renew` may have something to do."""
        return now >= self._renew_at

    def renew(self, nodes: Sequence[str], now: float) -> tuple[str, str] | None:
        """Chooses where a process is started now: the node, and its runtime environment; None if none is to be started.

        Args:
            nodes: the usable nodes, in any order; the same ones in each call, except those that have come or gone.
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
