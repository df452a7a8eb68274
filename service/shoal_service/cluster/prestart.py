"""Processes that Ray starts before there is an actor for them: its raylets keep them idle until an actor with the same
runtime environment comes, which then need not wait for a process.

Each such process becomes the process of one actor. If none comes, it ends itself (`shoal_workers/forkserver/idle.py`).
Nothing depends on it: if a request is lost, Ray starts the process with the actor. The raylet's service is not a public
interface (Ray's version is pinned). Called by `gateway/ray_cluster.py`.
"""

from __future__ import annotations

import logging
from typing import Any

from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.common_pb2 import PYTHON
from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
from ray.core.generated.runtime_environment_pb2 import RuntimeEnvConfig, RuntimeEnvInfo, RuntimeEnvUris

import ray
from shoal_service.cluster.gcs import RayNode

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
    request = PrestartWorkersRequest(
        language=PYTHON,
        job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
        runtime_env_info=RuntimeEnvInfo(
            serialized_runtime_env=environment,
            uris=RuntimeEnvUris(working_dir_uri=working_dir or ""),
            runtime_env_config=RuntimeEnvConfig(setup_timeout_seconds=_SETUP_TIMEOUT_S, eager_install=True),
        ),
        keep_alive_duration_secs=int(keep_s),
        num_workers=number,
    )
    channel = init_grpc_channel(f"{node.ip}:{node.raylet_port}")

    def answered(call: Any) -> None:
        error = call.exception()
        if error is not None:
            _log.info("prestart.failed", extra={"node": node.node_id, "error": str(error)})
        channel.close()

    NodeManagerServiceStub(channel).PrestartWorkers.future(request, timeout=_TIMEOUT_S).add_done_callback(answered)
