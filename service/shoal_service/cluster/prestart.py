"""Processes that Ray starts before there is an actor for them: its raylets keep them idle until an actor with the same
runtime environment comes, which then need not wait for a process.

Each such process becomes the process of one actor. If none comes, it ends itself (`shoal_workers/forkserver/idle.py`).
Nothing depends on it: if a request is lost, Ray starts the process with the actor. Called by `gateway/ray_cluster.py`.
"""

from __future__ import annotations

import logging

import ray
from shoal_service.cluster.gcs import RayNode
from shoal_workers.ray_internals import request_idle_processes

_log = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_SETUP_TIMEOUT_S = 600
"""Ray's own limit for the setup of a runtime environment."""


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
